/** What is asked of the server and what it answers; `jupyter_detllm/server/judge.py`. */
import { IJsonObject } from './json';

export const PROTOCOL = 2;

export type Update = 'new' | 'all';

/** A notebook as it is judged: its cells, and its own `detllm` metadata. */
export interface IQuestion {
  /** The same object as long as a cell did not change. */
  readonly cells: readonly IJsonObject[];
  readonly metadata: unknown;
  readonly update: Update | null;
  /** Numbers, from 1, of the cells that may be promoted; null for all. */
  readonly chosen: readonly number[] | null;
  /** Numbers of the cells that this page's kernel has just run. */
  readonly ran: readonly number[];
}

/** What a cell means for the whole; as `Standing` in Python. */
export type Standing =
  | 'accepted'
  | 'failed'
  | 'invalid'
  | 'stale'
  | 'recorded'
  | 'stripped'
  | 'unstamped'
  | 'not_comparable'
  | 'skipped'
  | 'relaxed';

/** A cell that generates, carries a stamp or a reference, or had one; it may be deleted. */
export interface ICellRow {
  readonly id: string;
  readonly number: number;
  readonly label: string;
  readonly verdict: string;
  readonly standing: Standing;
  /** The verdict for people, with what the policy made of it. */
  readonly text: string;
  readonly lines: readonly (readonly [label: string, text: string])[];
  /** Digest of the source that was judged; null where no source decides. */
  readonly source: string | null;
  readonly stamped: boolean;
  readonly promotable: boolean;
  readonly acceptable: boolean;
}

export interface IChange {
  readonly label: string;
  readonly kind: 'added' | 'replaced' | 'unchanged' | 'kept' | 'lost' | 'refused' | 'removed';
  readonly why: string;
}

/** The `detllm` metadata to be written: of cells by number, and of the notebook. */
export interface IPatch {
  readonly cells: readonly (readonly [number: number, metadata: IJsonObject | null])[];
  /** Of outputs, by cell number and index: what equals a reference is kept once. */
  readonly outputs: readonly (readonly [number: number, index: number, metadata: IJsonObject])[];
  readonly metadata: IJsonObject | null;
}

export interface IAnswer {
  /** Of the cells whose content was sent, in order. */
  readonly digests: readonly string[];
  /** Verdicts once the patch is applied. */
  readonly cells: readonly ICellRow[];
  readonly problems: readonly string[];
  /** Names of the controls that change results and came too late for some stamp. */
  readonly late: readonly string[];
  /** That the kernel has another version than the server. */
  readonly notes: readonly string[];
  /** Whether the notebook's metadata follows from its cells. */
  readonly in_order: boolean;
  /** Why nothing can be promoted in this notebook. */
  readonly refused: string | null;
  readonly changes: readonly IChange[];
  readonly patch: IPatch | null;
}

/** A request's body, and the cells whose content is in it. */
export function encode(
  question: IQuestion,
  digestOf: (cell: IJsonObject) => string | undefined
): { body: string; sent: IJsonObject[] } {
  const sent: IJsonObject[] = [];
  const { metadata, update, chosen, ran } = question;
  const cells = question.cells.map(cell => digestOf(cell) ?? sent.push(cell) - 1);
  const head = { protocol: PROTOCOL, cells, metadata, update, chosen, ran };
  // JSON text holds no line end of its own.
  return { body: [head, ...sent].map(part => JSON.stringify(part)).join('\n'), sent };
}
