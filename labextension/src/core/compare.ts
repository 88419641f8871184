/** Two sets of generations compared; `core/compare.py` in the browser. */
import { IEvidence, indexOf, margin, positionOf, runnerUpId } from './evidence';
import { ICall, IGeneration, IRequest } from './stamp';

export type EvidenceState = 'bitwise' | 'differs' | 'absent';

export interface IDivergence {
  readonly position: number;
  readonly margin: number | null;
  readonly actualMargin: number | null;
  readonly runnerUpTaken: boolean | null;
}

export interface IPair {
  readonly request: IRequest;
  readonly reference: IGeneration;
  readonly actual: IGeneration;
  readonly divergence: IDivergence | null;
  readonly finishEqual: boolean;
  readonly textEqual: boolean;
  readonly tokensEqual: boolean;
  readonly evidence: EvidenceState;
  readonly gap: number | null;
}

export interface IComparison {
  readonly pairs: readonly IPair[];
  readonly missing: number;
  readonly extra: number;
  readonly batchEqual: boolean;
  /** How many requests of the actual side were answered out of the result cache. */
  readonly cached: number;
  readonly complete: boolean;
  readonly nested: boolean;
  readonly tokensEqual: boolean;
  readonly textEqual: boolean;
  readonly evidence: EvidenceState;
  readonly gap: number | null;
  readonly first: IPair | null;
}

function sameNumbers(a: readonly number[], b: readonly number[]): boolean {
  return a.length === b.length && a.every((value, i) => value === b[i]);
}

/** The first index at which two sequences differ, or null. */
export function firstDivergence(a: readonly number[], b: readonly number[]): number | null {
  const shared = Math.min(a.length, b.length);
  for (let i = 0; i < shared; i++) {
    if (a[i] !== b[i]) {
      return i;
    }
  }
  return a.length === b.length ? null : shared;
}

function comparePair(request: IRequest, reference: IGeneration, actual: IGeneration): IPair {
  const position = firstDivergence(reference.tokenIds, actual.tokenIds);
  const prefix = position ?? reference.tokenIds.length;
  const [evidence, gap] = evidenceGap(reference.evidence, actual.evidence, prefix);
  const finishEqual = reference.finishReason === actual.finishReason;
  return {
    request,
    reference,
    actual,
    divergence: position === null ? null : divergence(reference, actual, position),
    finishEqual,
    textEqual: reference.text === actual.text && sameNumbers(reference.offsets, actual.offsets),
    tokensEqual: position === null && finishEqual,
    evidence,
    gap
  };
}

function divergence(reference: IGeneration, actual: IGeneration, position: number): IDivergence {
  const left = reference.evidence;
  const row = left ? indexOf(left, position) : null;
  let taken: boolean | null = null;
  if (left && row !== null && position < actual.tokenIds.length) {
    const runner = runnerUpId(left, row);
    taken = runner < 0 ? null : runner === actual.tokenIds[position];
  }
  return {
    position,
    margin: left ? margin(left, position) : null,
    actualMargin: actual.evidence ? margin(actual.evidence, position) : null,
    runnerUpTaken: taken
  };
}

/** Rows of the first `prefix` tokens, by position. */
function rowsOf(evidence: IEvidence, prefix: number): Map<number, number> {
  const rows = new Map<number, number>();
  for (let row = 0; row < evidence.rows; row++) {
    const position = positionOf(evidence, row);
    if (position < prefix) {
      rows.set(position, row);
    }
  }
  return rows;
}

function sameRow(a: IEvidence, x: number, b: IEvidence, y: number): boolean {
  const bits = (view: DataView, row: number) => view.getUint32(4 * row, true);
  return (
    bits(a.chosen, x) === bits(b.chosen, y) &&
    bits(a.runnerUp, x) === bits(b.runnerUp, y) &&
    bits(a.runnerUpIds, x) === bits(b.runnerUpIds, y)
  );
}

function distance(a: number, b: number): number {
  if (a === b || (Number.isNaN(a) && Number.isNaN(b))) {
    return 0;
  }
  const gap = Math.abs(a - b);
  return Number.isNaN(gap) ? Infinity : gap;
}

function evidenceGap(
  a: IEvidence | null,
  b: IEvidence | null,
  prefix: number
): [EvidenceState, number | null] {
  if (a === null || b === null || a.k !== b.k) {
    return ['absent', null];
  }
  const left = rowsOf(a, prefix);
  const right = rowsOf(b, prefix);
  const shared = [...left.keys()].filter(position => right.has(position));
  const pairs = shared.map(p => [left.get(p) as number, right.get(p) as number]);
  const equal = left.size === right.size && shared.length === left.size;
  if (equal && pairs.every(([x, y]) => sameRow(a, x, b, y))) {
    return ['bitwise', 0];
  }
  if (!shared.length) {
    return ['absent', null];
  }
  const at = (view: DataView, row: number) => view.getFloat32(4 * row, true);
  const gaps = pairs.map(([x, y]) =>
    Math.max(
      distance(at(a.chosen, x), at(b.chosen, y)),
      distance(at(a.runnerUp, x), at(b.runnerUp, y))
    )
  );
  return ['differs', gaps.reduce((most, gap) => Math.max(most, gap), 0)];
}

type Indexed = Map<string, { request: IRequest; generations: IGeneration[] }>;

function indexed(calls: readonly ICall[]): Indexed {
  const out: Indexed = new Map();
  const seen = new Map<string, number>();
  for (const call of calls) {
    const byPrompt: IGeneration[][] = call.requests.map(() => []);
    call.generations.forEach(generation => byPrompt[generation.prompt].push(generation));
    call.requests.forEach((request, i) => {
      const count = seen.get(request.digest) ?? 0;
      seen.set(request.digest, count + 1);
      out.set(`${request.digest} ${count}`, { request, generations: byPrompt[i] });
    });
  }
  return out;
}

function weakest(pairs: readonly IPair[]): EvidenceState {
  const states = new Set(pairs.map(pair => pair.evidence));
  return states.has('absent') ? 'absent' : states.has('differs') ? 'differs' : 'bitwise';
}

/** Each call with the tries that follow it. */
function chains(calls: readonly ICall[]): ICall[][] {
  const found: ICall[][] = [];
  for (const call of calls) {
    if (found.length && call.attempt !== null && call.attempt.number > 1) {
      found[found.length - 1].push(call);
    } else {
      found.push([call]);
    }
  }
  return found;
}

/** Whether every call had the same requests; `core/compare.py` in the browser. */
function sameBatches(reference: readonly ICall[], actual: readonly ICall[]): boolean {
  const batches = (calls: readonly ICall[]) => JSON.stringify(calls.map(batchOf));
  if (batches(reference) === batches(actual)) {
    return true;
  }
  const left = chains(reference);
  const right = chains(actual);
  return left.length === right.length && left.every((chain, i) => sameChain(chain, right[i]));
}

function batchOf(call: ICall): string {
  return JSON.stringify(call.requests.map(request => request.digest));
}

function sameChain(left: readonly ICall[], right: readonly ICall[]): boolean {
  for (let i = 0; i < Math.max(left.length, right.length); i++) {
    if (i >= left.length || i >= right.length || batchOf(left[i]) !== batchOf(right[i])) {
      return false;
    }
    // Another next try is no cause then, but a consequence.
    if (left[i].attempt !== null && left[i].digest !== right[i].digest) {
      return true;
    }
  }
  return true;
}

/** Compare all calls of a cell; requests are matched by digest and occurrence. */
export function compareCalls(reference: readonly ICall[], actual: readonly ICall[]): IComparison {
  const left = indexed(reference);
  const right = indexed(actual);
  const pairs: IPair[] = [];
  let missing = 0;
  for (const [key, side] of left) {
    const other = right.get(key);
    if (other) {
      side.generations.forEach((g, i) =>
        pairs.push(comparePair(side.request, g, other.generations[i]))
      );
    } else {
      missing++;
    }
  }
  const extra = [...right.keys()].filter(key => !left.has(key)).length;
  const gaps = pairs.flatMap(pair => (pair.gap === null ? [] : [pair.gap]));
  return {
    pairs,
    missing,
    extra,
    batchEqual: sameBatches(reference, actual),
    cached: actual.reduce((sum, call) => sum + call.cached.length, 0),
    complete: !missing && !extra,
    nested: pairs.length > 0 && !(missing && extra),
    tokensEqual: pairs.every(pair => pair.tokensEqual),
    textEqual: pairs.every(pair => pair.textEqual),
    evidence: weakest(pairs),
    gap: gaps.length ? gaps.reduce((most, gap) => Math.max(most, gap), 0) : null,
    first: pairs.find(pair => !pair.tokensEqual) ?? null
  };
}
