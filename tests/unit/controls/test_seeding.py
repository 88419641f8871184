from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator

import pytest

from jupyter_detllm.controls.seeding import (
    SEED_VARIABLE,
    generator,
    hooked,
    preserved_streams,
    root_seed,
    seed_child,
    seed_everything,
    worker_init_fn,
)
from jupyter_detllm.errors import ControlError
from tests.fakes import forget_seed
from tests.waiting import HANGS


@pytest.fixture(autouse=True)
def _no_seed_outlives_a_test() -> Iterator[None]:
    yield
    forget_seed()


def python(code: str, *args: str) -> str:
    """Run `code` in a fresh interpreter; return what it printed."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, *args],
        capture_output=True,
        text=True,
        timeout=HANGS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# -- seeds ---------------------------------------------------------------------


def test_random_and_numpy_are_what_their_own_seed_functions_give() -> None:
    np = pytest.importorskip("numpy")
    seed_everything(42)
    drawn = random.random(), np.random.rand()
    random.seed(42)
    np.random.seed(42)
    assert drawn == (random.random(), np.random.rand())
    assert root_seed() == 42


def test_seeds_beyond_32_bits_do_not_collide() -> None:
    np = pytest.importorskip("numpy")
    draws = set()
    for seed in (5, 5 + 2**32, 5 + 2**33, 2**63 - 1):
        seed_everything(seed)
        draws.add(float(np.random.rand()))
    assert len(draws) == 4


@pytest.mark.parametrize("seed", [-1, 2**63, True, "42", 1.0, None])
def test_what_is_no_seed_is_refused_and_changes_nothing(seed: object) -> None:
    seed_everything(7)
    with pytest.raises(ControlError, match="not a seed"):
        seed_everything(seed)  # type: ignore[arg-type]
    assert root_seed() == 7


def test_an_unknown_mode_is_refused_before_anything_is_seeded() -> None:
    seed_everything(7)
    with pytest.raises(ControlError, match="off, warn, error"):
        seed_everything(8, deterministic="maybe")
    assert root_seed() == 7


def test_the_sessions_generator_is_default_rng_and_one_object() -> None:
    np = pytest.importorskip("numpy")
    with pytest.raises(ControlError, match="nothing is seeded"):
        generator()
    seed_everything(11)
    first = generator()
    assert generator() is first
    assert first.random() == np.random.default_rng(11).random()
    assert first.random() != np.random.default_rng(11).random()  # the stream continues
    seed_everything(11)
    assert generator().random() == np.random.default_rng(11).random()


def test_children_have_their_own_seeds_that_repeat() -> None:
    seed_everything(3)
    assert seed_child(1) == seed_child(1, seed=3)
    seeds = [seed_child(index, seed=3) for index in range(3)]
    assert len(set(seeds)) == 3
    assert seeds == [seed_child(index, seed=3) for index in range(3)]
    assert seeds != [seed_child(index, seed=4) for index in range(3)]


def test_a_child_without_a_seeded_parent_says_so() -> None:
    os.environ.pop(SEED_VARIABLE, None)
    with pytest.raises(ControlError, match="no root seed"):
        seed_child(0)


def test_spawned_children_inherit_the_root_seed() -> None:
    code = (
        "from jupyter_detllm.controls.seeding import seed_child\n"
        "import random; print(seed_child(2), random.random())"
    )
    seed_everything(5)
    first = python(code)
    assert first == python(code)
    seed_everything(6)
    assert first != python(code)


def test_forgetting_leaves_nothing_behind() -> None:
    before = list(sys.meta_path)
    seed_everything(5)
    forget_seed()
    assert sys.meta_path == before
    assert hooked() == ()
    assert SEED_VARIABLE not in os.environ


# -- modules that are imported later ------------------------------------------

IMPORT_LATER = """
import sys
from jupyter_detllm.controls.seeding import seed_everything
meta_path = list(sys.meta_path)
report = seed_everything(123, deterministic=sys.argv[1])
assert {"torch", "numpy"}.isdisjoint(sys.modules), "seeding imported something heavy"
assert report.deferred == ("numpy", "torch"), report
import torch
drawn = torch.rand(3)
loader = torch.__spec__.loader
assert type(loader).__name__ == "SourceFileLoader" and "exec_module" not in vars(loader)
import numpy as np
values = np.random.rand(3)
assert sys.meta_path == meta_path, "the finder is still there"
torch.manual_seed(123); np.random.seed(123)
assert torch.equal(drawn, torch.rand(3)) and (values == np.random.rand(3)).all()
report = seed_everything(123)
assert report.seeded == ("random", "numpy", "torch") and not report.deferred, report
print(torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic)
"""


def test_torch_and_numpy_are_seeded_when_the_user_imports_them() -> None:
    pytest.importorskip("torch")
    assert python(IMPORT_LATER, "off") == "False True"


DETERMINISTIC = """
import sys, torch
from jupyter_detllm.controls.seeding import seed_everything
if sys.argv[1] == "user":
    torch.use_deterministic_algorithms(True)
for mode in sys.argv[2:]:
    seed_everything(1, deterministic=mode)
    print(torch.get_deterministic_debug_mode(), end=" ")
"""


def test_deterministic_algorithms_follow_the_mode_and_leave_the_users_choice() -> None:
    pytest.importorskip("torch")
    assert python(DETERMINISTIC, "nobody", "off", "warn", "error", "off") == "0 1 2 0"
    assert python(DETERMINISTIC, "user", "off") == "2"


FAILING_IMPORT = """
import sys, pathlib, tempfile, warnings
from jupyter_detllm.controls.seeding import hooked, on_import
folder = tempfile.mkdtemp(); sys.path.insert(0, folder)
module = pathlib.Path(folder, "late_module.py")
module.write_text("raise RuntimeError('broken')")
seen = []
on_import("late_module", lambda m: seen.append(m.value))
try:
    import late_module
except RuntimeError:
    pass
assert hooked() == ("late_module",)
module.write_text("value = 1  # now it works")
import importlib; importlib.invalidate_caches()
import late_module
assert seen == [1] and hooked() == ()
assert not [f for f in sys.meta_path if type(f).__module__.startswith("jupyter_detllm")]
pathlib.Path(folder, "other_module.py").write_text("value = 2")
importlib.invalidate_caches()
on_import("other_module", lambda m: 1 / 0)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import other_module
assert other_module.value == 2 and "division by zero" in str(caught[0].message)
print("ok")
"""


def test_the_hook_survives_a_failing_import_and_never_breaks_one() -> None:
    assert python(FAILING_IMPORT) == "ok"


PAST_THE_HOOK = """
import sys
from jupyter_detllm.controls.seeding import hooked
from jupyter_detllm.controls.seeding import seed_everything, seed_pending
meta_path = list(sys.meta_path)
seed_everything(8)
sys.meta_path[:] = meta_path
import numpy as np
np.random.rand(3)
assert seed_pending() == ("numpy.random",), "what came in past the hook"
drawn = np.random.rand(3)
np.random.seed(8)
assert (drawn == np.random.rand(3)).all()
assert seed_pending() == () and hooked() == ("torch",)
print("ok")
"""


def test_what_was_imported_past_the_hook_is_seeded_at_engine_start() -> None:
    pytest.importorskip("numpy")
    assert python(PAST_THE_HOOK) == "ok"


# -- streams continue as if no engine existed --------------------------------------


class Draws:
    """Draws from every global stream."""

    def __init__(self) -> None:
        self.np = pytest.importorskip("numpy")
        self.torch = pytest.importorskip("torch")

    def __call__(self) -> list[float]:
        return [
            random.random(),
            random.gauss(0, 1),  # keeps half of each pair for later
            float(self.np.random.rand()),
            float(self.np.random.standard_normal()),
            float(self.torch.rand(())),
            float(self.torch.randn(())),
        ]

    def disturb(self) -> None:
        """Do what an engine in process does to the streams."""
        random.seed(0)
        self.np.random.seed(0)
        self.torch.manual_seed(0)
        self()


def test_draws_with_and_without_an_engine_are_equal() -> None:
    draw = Draws()
    seed_everything(9)
    without = [draw() for _ in range(4)]
    seed_everything(9)
    with_engine = []
    for _ in range(4):
        with_engine.append(draw())
        with preserved_streams():
            draw.disturb()
    assert with_engine == without


def test_draws_in_a_process_that_never_was_seeded_go_on_too() -> None:
    draw = Draws()
    with preserved_streams():
        inside = draw()
    assert draw() == inside


def test_streams_are_restored_after_an_error_and_an_interrupt() -> None:
    draw = Draws()

    def generate(error: type[BaseException]) -> None:
        with preserved_streams():
            draw.disturb()
            raise error

    for error in (RuntimeError, KeyboardInterrupt):
        seed_everything(9)
        expected = draw()
        seed_everything(9)
        with pytest.raises(error):
            generate(error)
        assert draw() == expected


def test_nested_blocks_each_restore_their_own_moment() -> None:
    draw = Draws()
    seed_everything(1)
    first, second = draw(), draw()
    seed_everything(1)
    with preserved_streams():
        assert draw() == first
        with preserved_streams():
            draw.disturb()
        assert draw() == second
    assert draw() == first


def test_the_sessions_generator_is_not_moved() -> None:
    draw = Draws()
    seed_everything(1)
    expected = generator().random(4).tolist()
    seed_everything(1)
    stream = generator()
    values = [stream.random() for _ in range(2)]
    with preserved_streams():
        draw.disturb()
    assert [*values, *(stream.random() for _ in range(2))] == expected


FIRST_INSIDE = """
import random
from jupyter_detllm.controls.seeding import seed_everything
from jupyter_detllm.controls.seeding import preserved_streams
seed_everything(77)
with preserved_streams():
    import torch, numpy as np
    torch.manual_seed(0); np.random.seed(0); random.seed(0)
    torch.rand(5); np.random.rand(5); random.random()
got = float(torch.rand(())), float(np.random.rand()), random.random()
torch.manual_seed(77); np.random.seed(77); random.seed(77)
assert got == (float(torch.rand(())), float(np.random.rand()), random.random())
print("ok")
"""


def test_modules_first_imported_inside_are_as_if_imported_afterwards() -> None:
    pytest.importorskip("torch")
    assert python(FIRST_INSIDE) == "ok"


def test_seeds_that_wait_for_cuda_are_those_of_the_user() -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_initialized():
        pytest.skip("CUDA has started: nothing waits for it")
    seed_everything(4)
    before = dict(vars(torch.cuda._lazy_seed_tracker))
    with preserved_streams():
        torch.manual_seed(0)
        assert vars(torch.cuda._lazy_seed_tracker) != before
    assert vars(torch.cuda._lazy_seed_tracker) == before


# -- worker processes ----------------------------------------------------------

WORKERS = """
import random, sys
import numpy as np, torch
from torch.utils.data import DataLoader, Dataset
from jupyter_detllm.controls.seeding import seed_everything, worker_init_fn
class Noise(Dataset):
    def __len__(self): return 4
    def __getitem__(self, i):
        return np.array([random.random(), np.random.rand(), float(torch.rand(()))])
seed_everything(int(sys.argv[1]))
loader = DataLoader(Noise(), batch_size=1, num_workers=2, worker_init_fn=worker_init_fn)
print([[round(float(x), 12) for x in row] for batch in loader for row in batch])
"""


def test_data_loader_workers_repeat_and_differ_from_each_other() -> None:
    pytest.importorskip("torch")
    first = python(WORKERS, "1")
    assert first == python(WORKERS, "1")
    assert first != python(WORKERS, "2")
    rows = eval(first)  # noqa: S307 - our own print of nested lists of floats
    assert len({tuple(row) for row in rows}) == 4


def test_a_workers_streams_follow_torchs_worker_seed() -> None:
    np = pytest.importorskip("numpy")
    torch = pytest.importorskip("torch")
    torch.manual_seed(2**64 - 3)  # torch's worker seeds have 64 bits
    worker_init_fn(0)
    first = random.random(), float(np.random.rand())
    random.seed(0)
    np.random.seed(0)
    worker_init_fn(1)
    assert (random.random(), float(np.random.rand())) == first
