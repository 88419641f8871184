/** JSON from a notebook, which may hold anything. */

export interface IJsonObject {
  [key: string]: unknown;
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

/** Whether two JSON values are equal, whatever the order of keys. */
export function equal(a: unknown, b: unknown): boolean {
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
