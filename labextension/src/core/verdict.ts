/** One verdict per cell, from an ordered table of rules; `core/verdict.py` in the browser. */
import { shortDigest } from './canonical';
import { IComparison, compareCalls } from './compare';
import { IFieldDiff, IFingerprint, diffText, numericsDiff, sortDiffs, specOf } from './fingerprint';
import { IStamp, modelDifferences } from './stamp';

export type Verdict =
  | 'match'
  | 'tokens_match'
  | 'drift'
  | 'diverged'
  | 'stale'
  | 'recorded'
  | 'unstamped'
  | 'not_comparable'
  | 'error';

export interface IFacts {
  readonly problems: readonly string[];
  readonly hasReference: boolean;
  readonly hasActual: boolean;
  readonly sourceChanged: boolean;
  readonly sameRun: boolean;
  readonly incomparable: readonly string[];
  readonly fields: readonly IFieldDiff[];
  readonly comparison: IComparison | null;
  /** Says that a side lies beyond what its self-test showed; it decides no verdict. */
  readonly possibleCauses: readonly string[];
}

export interface IOutcome {
  readonly verdict: Verdict;
  readonly rule: string;
  readonly reasons: readonly string[];
  readonly facts: IFacts;
}

export const NO_FACTS: IFacts = {
  problems: [],
  hasReference: true,
  hasActual: true,
  sourceChanged: false,
  sameRun: false,
  incomparable: [],
  fields: [],
  comparison: null,
  possibleCauses: []
};

/** Three significant digits, as Python's `.3g`. */
export function threeDigits(value: number): string {
  if (!Number.isFinite(value) || value === 0) {
    return Number.isNaN(value) ? 'nan' : value === 0 ? '0' : value > 0 ? 'inf' : '-inf';
  }
  const [mantissa, exponent] = value.toExponential(2).split('e');
  const power = Number(exponent);
  const trimmed = (text: string) => (text.includes('.') ? text.replace(/\.?0+$/, '') : text);
  if (power < -4 || power >= 3) {
    const digits = String(Math.abs(power)).padStart(2, '0');
    return `${trimmed(mantissa)}e${power < 0 ? '-' : '+'}${digits}`;
  }
  return trimmed(value.toFixed(2 - power));
}

type Reasons = readonly string[] | null;

interface IRule {
  readonly name: string;
  readonly verdict: Verdict;
  readonly reasons: (facts: IFacts) => Reasons;
}

function some(reasons: readonly string[]): Reasons {
  return reasons.length ? reasons : null;
}

function noReference(facts: IFacts): Reasons {
  const what = facts.hasActual ? 'no reference yet' : 'neither stamp nor reference';
  return facts.hasReference ? null : [`${what}: nothing was verified`];
}

function otherRequests({ comparison }: IFacts): Reasons {
  if (comparison === null || comparison.complete) {
    return null;
  }
  if (comparison.nested && !comparison.tokensEqual) {
    return null; // what both sides hold differs: that is explained, not set aside
  }
  return [
    `the requests differ: ${comparison.missing} recorded were not made, ` +
      `${comparison.extra} made were not recorded`
  ];
}

function tokensDiffer({ comparison }: IFacts): boolean {
  return comparison !== null && !comparison.tokensEqual;
}

function match({ comparison }: IFacts): Reasons {
  const bitwise = comparison !== null && comparison.pairs.length > 0 && comparison.textEqual;
  return bitwise && comparison.evidence === 'bitwise'
    ? ['tokens, finish reasons and evidence are bitwise equal']
    : null;
}

function tokensMatch({ comparison, possibleCauses }: IFacts): Reasons {
  if (comparison === null || !comparison.pairs.length) {
    return null;
  }
  if (!comparison.textEqual) {
    return ['tokens are equal, but they were decoded to another text'];
  }
  if (comparison.evidence === 'absent') {
    return ['tokens are equal; evidence is absent on a side'];
  }
  const gap = comparison.gap === null ? '' : ` by up to ${threeDigits(comparison.gap)}`;
  return [`tokens are equal; logprobs differ${gap}`, ...possibleCauses];
}

export const RULES: readonly IRule[] = [
  { name: 'problem', verdict: 'error', reasons: facts => some(facts.problems) },
  { name: 'no-reference', verdict: 'unstamped', reasons: noReference },
  {
    name: 'no-actual',
    verdict: 'unstamped',
    reasons: facts =>
      facts.hasActual
        ? null
        : ['the output carries no stamp (cleared or stripped); the reference is still there']
  },
  {
    name: 'source-changed',
    verdict: 'stale',
    reasons: facts => (facts.sourceChanged ? ["the cell's source is not the stamped one"] : null)
  },
  {
    name: 'same-run',
    verdict: 'recorded',
    reasons: facts =>
      facts.sameRun ? ['the output is the run that was promoted: nothing was compared'] : null
  },
  { name: 'incomparable', verdict: 'not_comparable', reasons: facts => some(facts.incomparable) },
  { name: 'other-requests', verdict: 'stale', reasons: otherRequests },
  {
    name: 'drift',
    verdict: 'drift',
    reasons: facts =>
      tokensDiffer(facts) && facts.fields.length
        ? [...facts.fields.map(diffText), ...facts.possibleCauses]
        : null
  },
  {
    name: 'diverged',
    verdict: 'diverged',
    reasons: facts =>
      tokensDiffer(facts) ? ['no numerics field differs', ...facts.possibleCauses] : null
  },
  {
    name: 'cached',
    verdict: 'recorded',
    reasons: ({ comparison }) =>
      comparison?.cached ? ['equal, but out of the result cache: nothing was verified'] : null
  },
  { name: 'match', verdict: 'match', reasons: match },
  { name: 'tokens-match', verdict: 'tokens_match', reasons: tokensMatch },
  // Reached only when neither rule above found anything to compare.
  { name: 'nothing-compared', verdict: 'error', reasons: () => ['nothing was compared'] }
];

/** The outcome of the first rule that applies; exactly one always does. */
export function decide(facts: IFacts): IOutcome {
  for (const rule of RULES) {
    const reasons = rule.reasons(facts);
    if (reasons !== null) {
      return { verdict: rule.verdict, rule: rule.name, reasons, facts };
    }
  }
  throw new Error('the last rule applies to everything');
}

/** A stamp with the fingerprint that its digest stands for, null where it is unknown. */
export interface ISide {
  readonly stamp: IStamp;
  readonly fingerprint: IFingerprint | null;
}

/** The facts about two stamps. */
export function factsOf(
  reference: ISide,
  actual: ISide,
  presentSource: string,
  sameRun: boolean
): IFacts {
  const [left, right] = [reference.stamp, actual.stamp];
  const comparison = compareCalls(left.calls, right.calls);
  const level =
    left.level === right.level
      ? []
      : [`another level: ${right.level}, recorded was ${left.level}`];
  return {
    ...NO_FACTS,
    sourceChanged: left.source !== presentSource || right.source !== presentSource,
    sameRun,
    incomparable: [...modelDifferences(left.model, right.model), ...level],
    fields: numerics(reference, actual, comparison),
    comparison,
    possibleCauses: beyond(left, right)
  };
}

/** Say that a stamp lies beyond its reach: the recorded one where both do. */
function beyond(reference: IStamp, actual: IStamp): string[] {
  const found = [reference.reach, actual.reach].find(reach => reach?.beyond);
  if (!found) {
    return [];
  }
  const shown = `${counted(found.tokens, 'token')}, ${counted(found.sequences, 'sequence')}`;
  return [
    `the request lies beyond what the self-test showed (${shown}): ` +
      'batch composition is a possible cause'
  ];
}

function counted(count: number, what: string): string {
  return `${count.toLocaleString('en-US')} ${what}${count === 1 ? '' : 's'}`;
}

function numerics(reference: ISide, actual: ISide, comparison: IComparison): IFieldDiff[] {
  const diffs = fingerprintDiffs(reference, actual);
  // At the level invariant the batch is no cause: a difference there breaks the promise.
  if (!comparison.batchEqual && reference.stamp.level !== 'invariant') {
    diffs.push(batchDiff(reference.stamp, actual.stamp));
  }
  return sortDiffs(diffs);
}

function fingerprintDiffs(reference: ISide, actual: ISide): IFieldDiff[] {
  const left = reference.stamp.fingerprintDigest;
  const right = actual.stamp.fingerprintDigest;
  if (left === right) {
    return [];
  }
  if (reference.fingerprint === null || actual.fingerprint === null) {
    const why = 'The recorded fingerprint is not in the notebook, so its fields are unknown.';
    const sides = { left: shortDigest(left), right: shortDigest(right) };
    return [{ name: 'fingerprint', ...sides, why, weight: 50 }];
  }
  return numericsDiff(reference.fingerprint, actual.fingerprint);
}

function batchDiff(reference: IStamp, actual: IStamp): IFieldDiff {
  const left = batchText(reference);
  const text = batchText(actual);
  const right = left === text ? `${text}, in another order or company` : text;
  const spec = specOf('engine.batch');
  return { name: 'engine.batch', left, right, why: spec?.why ?? '', weight: spec?.weight ?? 0 };
}

function batchText(stamp: IStamp): string {
  const total = stamp.calls.reduce((sum, call) => sum + call.requests.length, 0);
  const calls = stamp.calls.length > 1 ? ` in ${stamp.calls.length} calls` : '';
  return `${total} request${total === 1 ? '' : 's'} together${calls}`;
}
