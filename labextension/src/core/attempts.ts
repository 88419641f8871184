/** The tries of a call whose texts are expected to look in a certain way; `core/attempts.py`. */
import { IJsonObject } from './canonical';
import { Reader, StampError } from './reader';

const MAX_TRIES = 100;
const KINDS = ['pattern', 'schema'];

export interface IAttempt {
  readonly kind: string;
  readonly expected: string;
  readonly number: number;
  readonly most: number;
  /** For each generation, the index of the first try's generation that it stands for. */
  readonly standsFor: readonly number[];
  /** Indices of the generations that are not as expected, ascending. */
  readonly unmet: readonly number[];
}

export function attemptJson(attempt: IAttempt): IJsonObject {
  return {
    kind: attempt.kind,
    expected: attempt.expected,
    number: attempt.number,
    most: attempt.most,
    stands_for: attempt.standsFor,
    unmet: attempt.unmet
  };
}

/** Read a call's attempt; null where its texts were not expected to be anything. */
export function readAttempt(reader: Reader, generations: number): IAttempt | null {
  if (!reader.has('attempt')) {
    return null;
  }
  const own = reader.sub('attempt');
  const kind = own.text('kind');
  if (!KINDS.includes(kind)) {
    throw new StampError(`${own.where}: 'kind' is unknown`);
  }
  const most = own.integer('most', 1, MAX_TRIES);
  const found: IAttempt = {
    kind,
    expected: own.digest('expected'),
    number: own.integer('number', 1, most),
    most,
    standsFor: own.integers('stands_for'),
    unmet: own.integers('unmet', generations - 1)
  };
  const ascending = found.unmet.every((index, i) => i === 0 || index > found.unmet[i - 1]);
  if (found.standsFor.length !== generations || !ascending) {
    throw new StampError(`${own.where} does not fit the generations`);
  }
  return found;
}

/** Refuse tries that do not follow from each other. */
export function checkAttempts(attempts: readonly (IAttempt | null)[], where: string): void {
  attempts.forEach((attempt, i) => {
    if (attempt !== null && !follows(i === 0 ? null : attempts[i - 1], attempt)) {
      throw new StampError(
        `${where}: try ${attempt.number} does not follow from the one before`
      );
    }
  });
}

function follows(before: IAttempt | null, attempt: IAttempt): boolean {
  if (attempt.number === 1) {
    return attempt.standsFor.every((place, i) => place === i);
  }
  if (before === null) {
    return false;
  }
  const left = before.unmet.map(index => before.standsFor[index]);
  return (
    before.kind === attempt.kind &&
    before.expected === attempt.expected &&
    before.most === attempt.most &&
    before.number + 1 === attempt.number &&
    left.length === attempt.standsFor.length &&
    left.every((place, i) => place === attempt.standsFor[i])
  );
}
