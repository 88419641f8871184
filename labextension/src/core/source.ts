/** A cell's source and its digest, as `core/stamp.py` has it. */
import { sha256Hex } from './sha256';

const WHITE = ' \t\v\f\n';
// White space as Python's str.isspace() has it, which is not what \s matches here.
const SPACE = ' \\t\\n\\r\\v\\f\\x1c-\\x1f\\x85\\xa0\\u1680\\u2000-\\u200a\\u2028\\u2029\\u202f\\u205f\\u3000';
const MAGIC = new RegExp(`^[${SPACE}]*%%detgen(?![\\p{L}\\p{N}_])`, 'u');

/** Whether a cell generates by the magic. */
export function isDetgen(source: string): boolean {
  return MAGIC.test(source);
}

/** A cell's source as it is digested. */
export function normaliseSource(source: string): string {
  const lines = source.replace(/\r\n/g, '\n').replace(/\r/g, '\n').split('\n');
  const first = lines.findIndex(line => [...line].some(char => !WHITE.includes(char)));
  const rest = lines.slice(first < 0 ? lines.length : first).join('\n');
  let end = rest.length;
  while (end > 0 && WHITE.includes(rest[end - 1])) {
    end--;
  }
  return rest.slice(0, end);
}

/** The digest of a source: of its RFC 8785 text, which for a string is its JSON. */
export function sourceDigest(source: string): string {
  const text = JSON.stringify(normaliseSource(source));
  return `sha256:${sha256Hex(new TextEncoder().encode(text))}`;
}
