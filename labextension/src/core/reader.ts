/** Typed access to untrusted JSON; `core/reading.py` in the browser. */
import {
  CanonicalError,
  IJsonObject,
  floatText,
  isDigest,
  isObject,
  own,
  parseFloatText
} from './canonical';

export class StampError extends Error {}

export const MAX_TEXT = 8_000_000;
export const MAX_ITEMS = 1_000_000;
const MAX_TOKEN = 2 ** 31 - 1;

export class Reader {
  readonly data: IJsonObject;

  constructor(
    data: unknown,
    readonly where: string
  ) {
    if (!isObject(data)) {
      throw new StampError(`${where} is not an object`);
    }
    this.data = data;
  }

  get(key: string): unknown {
    return own(this.data, key);
  }

  has(key: string): boolean {
    return Object.prototype.hasOwnProperty.call(this.data, key);
  }

  private fail(key: string, expected: string): StampError {
    return new StampError(
      `${this.where}: '${key}' is missing or malformed; expected ${expected}`
    );
  }

  /** Refuse keys that are not known, where each one there is changes what is meant. */
  nothingBut(known: readonly string[]): void {
    for (const key of Object.keys(this.data)) {
      if (!known.includes(key)) {
        throw new StampError(
          `${this.where}: '${key.slice(0, 40)}' is not known here; ` +
            'expected a stamp of this version, or a later jupyter-detllm'
        );
      }
    }
  }

  text(key: string): string {
    const value = this.get(key);
    if (typeof value !== 'string' || value.length > MAX_TEXT) {
      throw this.fail(key, 'text');
    }
    return value;
  }

  integer(key: string, low = 0, high = Number.MAX_SAFE_INTEGER): number {
    return this.checked(key, this.get(key), low, high);
  }

  private checked(key: string, value: unknown, low: number, high: number): number {
    if (typeof value !== 'number' || !Number.isInteger(value) || value < low || value > high) {
      throw this.fail(key, `an integer from ${low} to ${high}`);
    }
    return value;
  }

  integers(key: string, high = MAX_TOKEN, low = 0): number[] {
    return this.items(key).map(item => this.checked(key, item, low, high));
  }

  /** An integer stored as decimal text (a seed), without leading zeros. */
  bigInteger(key: string): string {
    return this.decimal(key, this.get(key));
  }

  bigIntegers(key: string): string[] {
    return this.items(key).map(item => this.decimal(key, item));
  }

  private decimal(key: string, value: unknown): string {
    if (typeof value !== 'string' || !/^[0-9]{1,20}$/.test(value)) {
      throw this.fail(key, 'a decimal string');
    }
    return value.replace(/^0+(?=.)/, '');
  }

  /** A float from its stored text, as Python spells it. */
  number(key: string): string {
    const value = this.get(key);
    if (typeof value === 'number') {
      return floatText(value);
    }
    const found =
      typeof value === 'string' && value.length <= 40 ? parseFloatText(value) : undefined;
    if (found === undefined) {
      throw this.fail(key, 'a number as a string');
    }
    return floatText(found);
  }

  flag(key: string): boolean {
    const value = this.get(key);
    if (typeof value !== 'boolean') {
      throw this.fail(key, 'true or false');
    }
    return value;
  }

  digest(key: string): string {
    const value = this.get(key);
    if (!isDigest(value)) {
      throw this.fail(key, 'a digest');
    }
    return value;
  }

  optionalDigest(key: string): string | null {
    const value = this.get(key);
    return value === undefined || value === null ? null : this.digest(key);
  }

  items(key: string): unknown[] {
    const value = this.get(key);
    if (!Array.isArray(value) || value.length > MAX_ITEMS) {
      throw this.fail(key, 'a list');
    }
    return value;
  }

  texts(key: string): string[] {
    const value = this.items(key);
    if (!value.every(item => typeof item === 'string' && item.length <= MAX_TEXT)) {
      throw this.fail(key, 'a list of texts');
    }
    return value as string[];
  }

  sub(key: string): Reader {
    return new Reader(this.get(key), `${this.where}.${key}`);
  }

  subs(key: string): Reader[] {
    return this.items(key).map((v, i) => new Reader(v, `${this.where}.${key}[${i}]`));
  }
}

/** Run a reader; what has no canonical form is a `StampError` too. */
export function reading<T>(where: string, read: () => T): T {
  try {
    return read();
  } catch (error) {
    if (error instanceof CanonicalError) {
      throw new StampError(`${where}: ${error.message}`);
    }
    throw error;
  }
}
