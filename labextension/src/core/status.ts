/** What a notebook's verdicts come to, for the indicator and the panel. */
import { IAnswer, ICellRow, Standing } from './protocol';
import { sourceDigest } from './source';

/** Only `verified` is green: every cell was compared and accepted, nothing was late. */
export type State = 'none' | 'stamped' | 'partly' | 'verified' | 'failed';

export interface IStatus {
  readonly state: State;
  /** One line, without the product's name. */
  readonly text: string;
  readonly cells: readonly ICellRow[];
  readonly problems: readonly string[];
  readonly late: readonly string[];
  readonly notes: readonly string[];
}

const NOTHING = { cells: [], problems: [], late: [], notes: [] };

/** Before the server has answered for the first time. */
export const WAITING: IStatus = { ...NOTHING, state: 'none', text: 'not compared yet' };

/** Where no server judges. */
export function notCompared(why: string): IStatus {
  return { ...NOTHING, state: 'none', text: 'not compared here', notes: [why] };
}

/** The row of a cell whose source was changed since it was judged. */
export function staleRow(row: ICellRow): ICellRow {
  const standing = row.standing === 'skipped' ? 'skipped' : 'stale';
  return { ...row, verdict: 'stale', standing, text: 'stale', lines: [] };
}

/** Whether a cell with this source is another than the one that was judged. */
export function isOutdated(row: ICellRow, source: string): boolean {
  return row.source !== null && row.source !== sourceDigest(source);
}

function inCells(what: string, count: number): string {
  return `${what} in ${count} cell${count === 1 ? '' : 's'}`;
}

function failures(cells: readonly ICellRow[]): string {
  const failed = cells.filter(cell => cell.standing === 'failed').map(cell => cell.verdict);
  const count = (verdict: string) => failed.filter(found => found === verdict).length;
  const drift = count('drift');
  const diverged = count('diverged');
  const other = failed.length - drift - diverged;
  const parts = [
    drift ? inCells('drift', drift) : '',
    diverged ? inCells('divergence', diverged) : '',
    other ? inCells('policy not met', other) : ''
  ];
  return parts.filter(part => part).join(', ');
}

function describe(
  cells: readonly ICellRow[],
  problems: readonly string[],
  late: boolean
): [State, string] {
  const count = (standing: Standing) => cells.filter(c => c.standing === standing).length;
  const invalid = count('invalid');
  if (invalid || problems.length) {
    return ['failed', invalid ? inCells('error', invalid) : 'error in the notebook metadata'];
  }
  const failed = failures(cells);
  if (failed) {
    return ['failed', failed];
  }
  const verified = count('accepted');
  if (verified) {
    const whole = verified === cells.length && !late;
    return [whole ? 'verified' : 'partly', `verified ${verified} of ${cells.length}`];
  }
  if (!cells.some(cell => cell.stamped)) {
    return ['none', 'not stamped'];
  }
  const recorded = count('recorded');
  if (recorded === cells.length) {
    return ['stamped', `stamped, ${recorded} cell${recorded === 1 ? '' : 's'}`];
  }
  if (recorded) {
    return ['partly', `stamped ${recorded} of ${cells.length}`];
  }
  return ['partly', waiting(cells, count)];
}

function waiting(cells: readonly ICellRow[], count: (s: Standing) => number): string {
  const promotable = cells.filter(cell => cell.promotable).length;
  if (promotable) {
    return `not stamped: ${inCells('stamps', promotable)} not in the metadata`;
  }
  const words: [Standing, string][] = [
    ['stale', 'source changed'],
    ['not_comparable', 'not comparable'],
    ['relaxed', 'accepted by a relaxed policy'],
    ['skipped', 'skipped'],
    ['stripped', 'reference without a stamp'],
    ['unstamped', 'nothing to compare']
  ];
  const [standing, word] = words.find(([found]) => count(found)) ?? words[5];
  return inCells(word, count(standing));
}

/** The status of a notebook; `stale` are the ids of cells changed since they were judged. */
export function statusOf(
  answer: IAnswer,
  stale: ReadonlySet<string>,
  notes: readonly string[]
): IStatus {
  const cells = answer.cells.map(row => (stale.has(row.id) ? staleRow(row) : row));
  const { problems, late } = answer;
  const [state, text] = describe(cells, problems, late.length > 0);
  const words = [text, late.length ? 'late controls' : '', notes.length ? 'versions differ' : ''];
  return { state, text: words.filter(word => word).join('; '), cells, problems, late, notes };
}
