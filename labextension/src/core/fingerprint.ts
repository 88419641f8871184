/** Fingerprints and how two differ; `core/fingerprint.py` in the browser. */
import { IJsonObject, brief, digestOf, isObject, own } from './canonical';
import { FIELDS } from './fields';
import { StampError } from './reader';

export const FINGERPRINT_SCHEMA = 'detllm.fingerprint/1';
const MAX_FIELDS = 256;
const MAX_VALUE_CHARS = 400;
const UNKNOWN_WEIGHT = 49;

export type FieldValue = string | number | boolean | null;

export interface IFingerprint {
  readonly numerics: ReadonlyMap<string, FieldValue>;
  readonly digest: string;
}

export interface IFieldDiff {
  readonly name: string;
  readonly left: FieldValue;
  readonly right: FieldValue;
  readonly why: string;
  readonly weight: number;
}

function readRole(data: IJsonObject, role: string): Map<string, FieldValue> {
  const fields = own(data, role) ?? {};
  if (!isObject(fields)) {
    throw new StampError(`the ${role} fields of a fingerprint are not an object`);
  }
  const out = new Map<string, FieldValue>();
  for (const [name, value] of Object.entries(fields)) {
    if (name.length > 100) {
      throw new StampError('a fingerprint field has no usable name');
    }
    out.set(name, fieldValue(name, value));
  }
  return out;
}

function fieldValue(name: string, value: unknown): FieldValue {
  const plain = value === null || typeof value === 'boolean' || typeof value === 'string';
  if (!plain && !(typeof value === 'number' && Number.isInteger(value))) {
    throw new StampError(`the fingerprint field '${name}' is not text, integer or boolean`);
  }
  if (typeof value === 'string' && value.length > 4 * MAX_VALUE_CHARS) {
    throw new StampError(`the fingerprint field '${name}' is too long`);
  }
  return value as FieldValue;
}

/** Read a stored fingerprint; unknown keys are ignored, unknown fields kept. */
export function readFingerprint(data: unknown): IFingerprint {
  if (!isObject(data)) {
    throw new StampError('a fingerprint is not an object');
  }
  const schema = own(data, 'schema');
  if (schema !== FINGERPRINT_SCHEMA) {
    throw new StampError(`a fingerprint has schema ${brief(schema)}`);
  }
  const [numerics, ...others] = ['numerics', 'identity', 'informational'].map(role =>
    readRole(data, role)
  );
  if (numerics.size + others.reduce((sum, role) => sum + role.size, 0) > MAX_FIELDS) {
    throw new StampError(`a fingerprint has more than ${MAX_FIELDS} fields`);
  }
  // A field without a value is an absent one.
  const digested = Object.fromEntries([...numerics].filter(([, value]) => value !== null));
  return { numerics, digest: digestOf(digested) };
}

export interface IFieldSpec {
  readonly isNumerics: boolean;
  readonly weight: number;
  readonly why: string;
}

/** The table's row of a field; every control without one of its own shares one. */
export function specOf(name: string): IFieldSpec | undefined {
  const isOwn = Object.prototype.hasOwnProperty.call(FIELDS, name);
  const row = isOwn ? FIELDS[name] : name.startsWith('controls.') ? FIELDS['controls.*'] : null;
  return row ? { isNumerics: row[0], weight: row[1], why: row[2] } : undefined;
}

/** The numerics fields that differ, the likeliest to change results first. */
export function numericsDiff(left: IFingerprint, right: IFingerprint): IFieldDiff[] {
  const names = new Set([...left.numerics.keys(), ...right.numerics.keys()]);
  const out: IFieldDiff[] = [];
  for (const name of names) {
    const a = left.numerics.get(name) ?? null;
    const b = right.numerics.get(name) ?? null;
    if (a !== b) {
      const spec = specOf(name);
      const why = spec?.why ?? 'This version does not know the field.';
      out.push({ name, left: a, right: b, why, weight: spec?.weight ?? UNKNOWN_WEIGHT });
    }
  }
  return sortDiffs(out);
}

export function sortDiffs(diffs: IFieldDiff[]): IFieldDiff[] {
  return diffs.sort((a, b) => b.weight - a.weight || (a.name < b.name ? -1 : 1));
}

export function fieldText(value: FieldValue): string {
  if (typeof value === 'boolean') {
    return value ? 'True' : 'False';
  }
  return value === null ? '(absent)' : String(value);
}

/** ``name: left -> right``. */
export function diffText(diff: IFieldDiff): string {
  return `${diff.name}: ${fieldText(diff.left)} -> ${fieldText(diff.right)}`;
}
