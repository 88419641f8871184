/** Logprobs of chosen and runner-up tokens; `core/evidence.py` in the browser. */
import { IJsonObject, isObject, own } from './canonical';
import { StampError } from './reader';

const MAX_K = 1024;
const MAX_TOKENS = 4096;
const NEAR_TIE = 0.5;

export interface IEvidence {
  readonly tokens: number;
  readonly k: number;
  readonly chosen: DataView;
  readonly runnerUp: DataView;
  readonly runnerUpIds: DataView;
  /** The positions kept, ascending; null when all are. */
  readonly positions: readonly number[] | null;
  readonly rows: number;
}

const BASE64 = /^[A-Za-z0-9+/]*={0,2}$/;

function unpack(value: unknown, count: number | null, most: number): DataView {
  if (typeof value !== 'string' || value.length > 4 * (Math.floor((4 * most + 2) / 3) + 1)) {
    throw new StampError('an evidence array is missing or too long');
  }
  if (!BASE64.test(value) || value.length % 4) {
    throw new StampError('an evidence array is not base64');
  }
  const raw = Uint8Array.from(atob(value), char => char.charCodeAt(0));
  if (raw.length % 4 || (count !== null && raw.length !== 4 * count)) {
    throw new StampError('an evidence array does not fit the number of generated tokens');
  }
  return new DataView(raw.buffer);
}

function floats(value: unknown, count: number): DataView {
  const view = unpack(value, count, count);
  for (let at = 0; at < view.byteLength; at += 4) {
    const bits = view.getUint32(at, true);
    const isNaN = (bits & 0x7f800000) === 0x7f800000 && (bits & 0x7fffff) !== 0;
    if (isNaN && !(bits & 0x400000)) {
      throw new StampError('an evidence array holds a signalling NaN');
    }
  }
  return view;
}

function readPositions(value: unknown, tokens: number): number[] {
  const view = unpack(value, null, tokens);
  const out: number[] = [];
  for (let at = 0; at < view.byteLength; at += 4) {
    const position = view.getInt32(at, true);
    if (position < 0 || position >= tokens || position <= (out[out.length - 1] ?? -1)) {
      throw new StampError('evidence positions are not ascending positions of tokens');
    }
    out.push(position);
  }
  return out;
}

/** Read the stored evidence about `tokens` generated tokens. */
export function readEvidence(data: unknown, tokens: number): IEvidence {
  if (!isObject(data)) {
    throw new StampError('evidence is not an object');
  }
  const k = own(data, 'k');
  const fits = typeof k === 'number' && Number.isInteger(k) && k >= 1 && k <= MAX_K;
  if (own(data, 'tokens') !== tokens || !fits) {
    throw new StampError('evidence does not fit the number of generated tokens');
  }
  const listed = own(data, 'positions');
  const positions = listed === undefined ? null : readPositions(listed, tokens);
  const rows = positions ? positions.length : tokens;
  return {
    tokens,
    k: k as number,
    chosen: floats(own(data, 'chosen'), rows),
    runnerUp: floats(own(data, 'runner_up'), rows),
    runnerUpIds: unpack(own(data, 'runner_up_ids'), rows, rows),
    positions,
    rows
  };
}

export function indexOf(evidence: IEvidence, position: number): number | null {
  if (evidence.positions === null) {
    return position >= 0 && position < evidence.tokens ? position : null;
  }
  const index = evidence.positions.indexOf(position);
  return index < 0 ? null : index;
}

export function positionOf(evidence: IEvidence, row: number): number {
  return evidence.positions === null ? row : evidence.positions[row];
}

export function runnerUpId(evidence: IEvidence, row: number): number {
  return evidence.runnerUpIds.getInt32(4 * row, true);
}

/** Chosen minus runner-up at `position` in nats, null if not kept. */
export function margin(evidence: IEvidence, position: number): number | null {
  const row = indexOf(evidence, position);
  if (row === null || runnerUpId(evidence, row) < 0) {
    return null;
  }
  const gap = evidence.chosen.getFloat32(4 * row, true) - evidence.runnerUp.getFloat32(4 * row, true);
  return Number.isNaN(gap) ? null : gap;
}

export type MarginClass = 'tie' | 'near-tie' | 'confident';

export function marginClass(gap: number): MarginClass {
  return gap === 0 ? 'tie' : Math.abs(gap) <= NEAR_TIE ? 'near-tie' : 'confident';
}

function base64(view: DataView, rows: readonly number[] | null): string {
  const bytes = new Uint8Array(view.buffer, view.byteOffset, view.byteLength);
  const parts: string[] = [];
  for (const row of rows ?? Array(bytes.length / 4).keys()) {
    parts.push(String.fromCharCode(...bytes.subarray(4 * row, 4 * row + 4)));
  }
  return btoa(parts.join(''));
}

function smallest(evidence: IEvidence): number[] | null {
  if (evidence.positions !== null || evidence.tokens <= MAX_TOKENS) {
    return null;
  }
  const gaps = Array.from({ length: evidence.tokens }, (_, i) =>
    Math.abs(evidence.chosen.getFloat32(4 * i, true) - evidence.runnerUp.getFloat32(4 * i, true))
  );
  const order = gaps.map((_, i) => i).sort((a, b) => {
    const [x, y] = [Number.isNaN(gaps[a]), Number.isNaN(gaps[b])];
    return x !== y ? Number(x) - Number(y) : x || gaps[a] === gaps[b] ? a - b : gaps[a] - gaps[b];
  });
  return order.slice(0, MAX_TOKENS).sort((a, b) => a - b);
}

/** The stored form, as Python would write it again. */
export function evidenceJson(evidence: IEvidence): IJsonObject {
  const kept = smallest(evidence);
  const out: IJsonObject = {
    k: evidence.k,
    tokens: evidence.tokens,
    chosen: base64(evidence.chosen, kept),
    runner_up: base64(evidence.runnerUp, kept),
    runner_up_ids: base64(evidence.runnerUpIds, kept)
  };
  const positions = kept ?? evidence.positions;
  if (positions !== null) {
    const view = new DataView(new ArrayBuffer(4 * positions.length));
    positions.forEach((position, i) => view.setInt32(4 * i, position, true));
    out.positions = base64(view, null);
  }
  return out;
}
