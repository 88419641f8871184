/** Values to RFC 8785 text to digests; `core/canonical.py` in the browser. */
import { sha256Hex } from './sha256';

export class CanonicalError extends Error {}

export type Json = unknown;
export interface IJsonObject {
  [key: string]: unknown;
}

const MAX_DEPTH = 64;
const encoder = new TextEncoder();

/** Bytes of a text that holds no lone surrogate. */
export function utf8(text: string): Uint8Array {
  return encoder.encode(text);
}

export function isObject(value: unknown): value is IJsonObject {
  return typeof value === 'object' && value !== null && !Array.isArray(value);
}

/** The value as an object: an empty one for anything else. */
export function mapping(value: unknown): IJsonObject {
  return isObject(value) ? value : {};
}

/** An own property; what prototypes hold is not data. */
export function own(data: IJsonObject, key: string): unknown {
  return Object.prototype.hasOwnProperty.call(data, key) ? data[key] : undefined;
}

const LONE = /[\ud800-\udbff](?![\udc00-\udfff])|(?:[^\ud800-\udbff]|^)[\udc00-\udfff]/;

export function isUnicode(text: string): boolean {
  return !LONE.test(text);
}

/** A float as Python spells it: shortest digits, exponents from 1e16 and below 1e-4. */
export function floatText(value: number): string {
  if (Number.isNaN(value)) {
    return 'NaN';
  }
  if (!Number.isFinite(value)) {
    return value > 0 ? 'Infinity' : '-Infinity';
  }
  if (value === 0) {
    return '0.0';
  }
  const [mantissa, exponent] = value.toExponential().split('e');
  const power = Number(exponent);
  if (power < -4 || power >= 16) {
    const digits = String(Math.abs(power)).padStart(2, '0');
    return `${mantissa}e${power < 0 ? '-' : '+'}${digits}`;
  }
  return Number.isInteger(value) ? `${value}.0` : decimal(mantissa, power);
}

function decimal(mantissa: string, power: number): string {
  const sign = mantissa.startsWith('-') ? '-' : '';
  const digits = mantissa.replace('-', '').replace('.', '');
  if (power < 0) {
    return `${sign}0.${'0'.repeat(-power - 1)}${digits}`;
  }
  return `${sign}${digits.slice(0, power + 1)}.${digits.slice(power + 1) || '0'}`;
}

function numberText(value: number): string {
  if (Number.isSafeInteger(value)) {
    return String(value === 0 ? 0 : value);
  }
  if (Number.isInteger(value)) {
    throw new CanonicalError('a number is too large to be exact here');
  }
  return JSON.stringify(floatText(value));
}

function checkedText(value: string): string {
  if (!isUnicode(value)) {
    throw new CanonicalError('a text holds a lone surrogate, which is not Unicode text');
  }
  return JSON.stringify(value);
}

/** The RFC 8785 text of a JSON value; a number that is no integer is its text. */
export function canonicalText(value: Json, depth = 0): string {
  if (depth > MAX_DEPTH) {
    throw new CanonicalError(`a value is nested deeper than ${MAX_DEPTH} levels`);
  }
  if (typeof value === 'string') {
    return checkedText(value);
  }
  if (typeof value === 'number') {
    return numberText(value);
  }
  if (Array.isArray(value)) {
    // Tokens and offsets are most of a stamp.
    if (depth < MAX_DEPTH && value.every(Number.isSafeInteger)) {
      return `[${value.join(',')}]`;
    }
    return `[${value.map(item => canonicalText(item, depth + 1)).join(',')}]`;
  }
  if (isObject(value)) {
    // The default order of sort() is by UTF-16 unit, as RFC 8785 wants it.
    const pairs = Object.keys(value)
      .sort()
      .map(key => `${checkedText(key)}:${canonicalText(value[key], depth + 1)}`);
    return `{${pairs.join(',')}}`;
  }
  if (value === null || value === true || value === false) {
    return String(value);
  }
  throw new CanonicalError(`a ${typeof value} has no canonical form`);
}

/** The digest of a JSON value, as `sha256:` and 64 hexadecimal digits. */
export function digestOf(value: Json): string {
  return `sha256:${sha256Hex(utf8(canonicalText(value)))}`;
}

const DIGEST = /^sha256:[0-9a-f]{64}$/;

export function isDigest(value: unknown): value is string {
  return typeof value === 'string' && DIGEST.test(value);
}

/** The first 12 hexadecimal digits, for people. */
export function shortDigest(digest: string): string {
  return digest.slice(7, 19);
}

/** An untrusted value on at most 40 characters, for a message. */
export function brief(value: unknown): string {
  if (Array.isArray(value) || isObject(value)) {
    return Array.isArray(value) ? 'a list' : 'a dict';
  }
  const text = typeof value === 'string' ? `'${value.slice(0, 80)}'` : String(value);
  return text.length <= 40 ? text : `${text.slice(0, 37)}...`;
}

/** Whether two JSON values are equal, whatever the order of keys. */
export function equal(a: Json, b: Json): boolean {
  if (a === b) {
    return true;
  }
  if (Array.isArray(a)) {
    return Array.isArray(b) && a.length === b.length && a.every((item, i) => equal(item, b[i]));
  }
  if (!isObject(a) || !isObject(b)) {
    return false;
  }
  const keys = Object.keys(a);
  return (
    keys.length === Object.keys(b).length &&
    keys.every(key => Object.prototype.hasOwnProperty.call(b, key) && equal(a[key], b[key]))
  );
}

const FLOAT = /^[+-]?(?:\d+(?:_\d+)*(?:\.(?:\d+(?:_\d+)*)?)?|\.\d+(?:_\d+)*)(?:[eE][+-]?\d+(?:_\d+)*)?$/;
const NAMED = /^([+-]?)(inf(?:inity)?|nan)$/i;

/** A float from the texts that Python's `float` reads; undefined for any other. */
export function parseFloatText(text: string): number | undefined {
  const trimmed = text.trim();
  const named = NAMED.exec(trimmed);
  if (named) {
    const value = named[2].toLowerCase() === 'nan' ? NaN : Infinity;
    return named[1] === '-' ? -value : value;
  }
  return FLOAT.test(trimmed) ? Number(trimmed.replace(/_/g, '')) : undefined;
}
