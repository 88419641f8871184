/** What a user accepts; `core/policy.py` in the browser. */
import { floatText, parseFloatText } from './canonical';
import { IComparison } from './compare';
import { Verdict } from './verdict';

export class PolicyError extends Error {}

export interface IPolicy {
  readonly kind: 'tokens' | 'bitwise' | 'within' | 'prefix';
  readonly atol: number;
  readonly n: number;
}

export const DEFAULT_POLICY: IPolicy = { kind: 'tokens', atol: 0, n: 0 };

const EXPECTED = 'bitwise, tokens, within(ATOL) or prefix(N)';
const FORM = /^(?:(within|prefix)\(\s*([^()\s]+)\s*\)|(tokens|bitwise))$/;

export function parsePolicy(text: string): IPolicy {
  const found = FORM.exec(text.trim());
  if (found === null) {
    throw new PolicyError(`'${text.slice(0, 40)}' is not a policy; expected ${EXPECTED}`);
  }
  const [, name, argument, plain] = found;
  if (plain) {
    return { ...DEFAULT_POLICY, kind: plain as 'tokens' | 'bitwise' };
  }
  if (name === 'prefix') {
    const n = /^\+?\d+(?:_\d+)*$/.test(argument) ? Number(argument.replace(/_/g, '')) : 0;
    if (n >= 1) {
      return { kind: 'prefix', atol: 0, n };
    }
  } else {
    const atol = parseFloatText(argument);
    if (atol !== undefined && Number.isFinite(atol) && atol >= 0) {
      return { kind: 'within', atol, n: 0 };
    }
  }
  throw new PolicyError(
    `'${argument.slice(0, 40)}' does not fit ${name}(...); expected ${EXPECTED}`
  );
}

export function policyText(policy: IPolicy): string {
  if (policy.kind === 'within') {
    return `within(${floatText(policy.atol)})`;
  }
  return policy.kind === 'prefix' ? `prefix(${policy.n})` : policy.kind;
}

/** Whether a cell with this verdict is accepted. */
export function accepts(
  policy: IPolicy,
  verdict: Verdict,
  comparison: IComparison | null
): boolean {
  if (verdict === 'match') {
    return true;
  }
  if (comparison === null || !comparison.complete || comparison.cached) {
    return false;
  }
  switch (policy.kind) {
    case 'tokens':
      return verdict === 'tokens_match';
    case 'within':
      return verdict === 'tokens_match' && within(policy, comparison);
    case 'prefix':
      return ['tokens_match', 'drift', 'diverged'].includes(verdict) && prefix(policy, comparison);
    default:
      return false;
  }
}

function within(policy: IPolicy, comparison: IComparison): boolean {
  const shown = comparison.evidence !== 'absent' && comparison.textEqual;
  return shown && comparison.gap !== null && comparison.gap <= policy.atol;
}

function prefix(policy: IPolicy, comparison: IComparison): boolean {
  return comparison.pairs.every(
    pair => pair.divergence === null || pair.divergence.position >= policy.n
  );
}
