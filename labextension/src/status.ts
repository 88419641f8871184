/** What a notebook's stamps say, for the indicator and the panel. */
import { specOf } from './core/fingerprint';
import { ICellView, INotebookView, checkCell } from './core/notebook';
import { DEFAULT_POLICY, IPolicy, accepts, policyText } from './core/policy';
import { IOutcome, Verdict } from './core/verdict';

/** What a cell means for the whole; as `Standing` in Python. */
export type Standing =
  | 'accepted'
  | 'failed'
  | 'invalid'
  | 'stale'
  | 'recorded'
  | 'unstamped'
  | 'not_comparable'
  | 'skipped'
  | 'relaxed';

export interface ICellStatus {
  readonly view: ICellView;
  readonly outcome: IOutcome;
  readonly policy: IPolicy;
  readonly standing: Standing;
}

/** Only `verified` is green: every cell was compared and accepted, nothing was late. */
export type State = 'none' | 'stamped' | 'partly' | 'verified' | 'failed';

export interface IStatus {
  readonly state: State;
  /** One line, without the product's name. */
  readonly text: string;
  readonly cells: readonly ICellStatus[];
  readonly problems: readonly string[];
  /** Names of the controls that change results and came too late for some stamp. */
  readonly late: readonly string[];
}

export const EMPTY: IStatus = {
  state: 'none',
  text: 'not stamped',
  cells: [],
  problems: [],
  late: []
};

const UNVERIFIED: { readonly [verdict in Verdict]?: Standing } = {
  stale: 'stale',
  recorded: 'recorded',
  unstamped: 'unstamped',
  not_comparable: 'not_comparable'
};

function cellStatus(view: ICellView, notebook: INotebookView): ICellStatus {
  const outcome = checkCell(view, notebook);
  const policy = view.policy ?? DEFAULT_POLICY;
  return { view, outcome, policy, standing: standingOf(view, outcome, policy) };
}

function standingOf(view: ICellView, outcome: IOutcome, policy: IPolicy): Standing {
  const { verdict } = outcome;
  if (view.skipped) {
    return 'skipped';
  }
  if (verdict === 'error') {
    return 'invalid';
  }
  const unverified = UNVERIFIED[verdict];
  if (unverified) {
    return unverified;
  }
  if (!accepts(policy, verdict, outcome.facts.comparison)) {
    return 'failed';
  }
  return verdict === 'match' || verdict === 'tokens_match' ? 'accepted' : 'relaxed';
}

/** The verdict for people, with what the policy made of it. */
export function verdictText(cell: ICellStatus): string {
  const words: { readonly [standing in Standing]?: string } = {
    failed: `, not accepted by policy ${policyText(cell.policy)}`,
    relaxed: `, accepted by policy ${policyText(cell.policy)}`,
    skipped: ', skipped by its tag'
  };
  return `${cell.outcome.verdict}${words[cell.standing] ?? ''}`;
}

function inCells(what: string, count: number): string {
  return `${what} in ${count} cell${count === 1 ? '' : 's'}`;
}

function failures(cells: readonly ICellStatus[]): string {
  const failed = cells.filter(cell => cell.standing === 'failed').map(c => c.outcome.verdict);
  const count = (verdict: Verdict) => failed.filter(found => found === verdict).length;
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
  cells: readonly ICellStatus[],
  problems: readonly string[],
  late: boolean
): [State, string] {
  const count = (standing: Standing) => cells.filter(c => c.standing === standing).length;
  const carrying = cells.filter(({ view }) => view.actual || view.reference).length;
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
  if (!carrying) {
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

function waiting(cells: readonly ICellStatus[], count: (s: Standing) => number): string {
  const stampable = cells.filter(({ view }) => view.actual && !view.referenceJson).length;
  if (stampable) {
    return `not stamped: ${inCells('stamps', stampable)} not in the metadata`;
  }
  const words: [Standing, string][] = [
    ['stale', 'source changed'],
    ['not_comparable', 'not comparable'],
    ['relaxed', 'accepted by a relaxed policy'],
    ['skipped', 'skipped'],
    ['unstamped', 'nothing to compare']
  ];
  const [standing, word] = words.find(([found]) => count(found)) ?? words[4];
  return inCells(word, count(standing));
}

/** The status of a notebook. */
export function statusOf(view: INotebookView): IStatus {
  const cells = view.cells.map(cell => cellStatus(cell, view));
  const names = new Set(cells.flatMap(cell => cell.view.actual?.late ?? []));
  // A control that is not known to change results is no reason to distrust a match.
  const late = [...names].filter(name => specOf(`controls.${name}`)?.isNumerics);
  const [state, text] = describe(cells, view.problems, late.length > 0);
  return {
    state,
    text: late.length ? `${text}; late controls` : text,
    cells,
    problems: view.problems,
    late
  };
}
