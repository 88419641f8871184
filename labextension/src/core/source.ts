/** A cell's source and its digest, as `core/stamp.py` has it. */
import { sha256Hex } from './sha256';

const WHITE = ' \t\v\f\n';
// White space as Python's str.isspace() has it, which is not what \s matches here.
const SPACE = ' \\t\\n\\r\\v\\f\\x1c-\\x1f\\x85\\xa0\\u1680\\u2000-\\u200a\\u2028\\u2029\\u202f\\u205f\\u3000';
const DETGEN = '%%detgen(?![\\p{L}\\p{N}_?])';
const MAGIC = new RegExp(`^[${SPACE}]*${DETGEN}`, 'u');
// Other cell magics may stand above it, each on its line.
const OUTER = `[${SPACE}]*%%([^${SPACE}]+)(?:(?!\\n)[${SPACE}][^\\n]*)?\\n`;
const NESTED = new RegExp(`^((?:${OUTER})*?)[${SPACE}]*${DETGEN}`, 'u');
const NAMES = new RegExp(OUTER, 'gu');
const NOT_RUN = new Set(
  (
    '! bash cmd file html HTML javascript js latex markdown perl pypy python python2 python3 ' +
    'ruby script sh svg SVG sx system writefile'
  ).split(' ')
);

/** Whether a cell generates by the magic on its first line. */
export function isDetgen(source: string): boolean {
  return MAGIC.test(source);
}

/** Whether a cell's body is a prompt, also under another magic such as `%%time`. */
export function holdsPrompt(source: string): boolean {
  const found = NESTED.exec(source);
  return found !== null && [...found[1].matchAll(NAMES)].every(outer => !NOT_RUN.has(outer[1]));
}

/** A cell's source as it is digested. */
export function normaliseSource(source: string): string {
  const lines = source.replace(/\r\n/g, '\n').replace(/\r/g, '\n').split('\n');
  const filled = lines.map(line => [...line].some(char => !WHITE.includes(char)));
  const first = filled.indexOf(true);
  const text = first < 0 ? '' : lines.slice(first, filled.lastIndexOf(true) + 1).join('\n');
  // At the end of a prompt white space is part of what is sent.
  return holdsPrompt(text) ? text : withoutEnd(text);
}

function withoutEnd(text: string): string {
  let end = text.length;
  while (end > 0 && WHITE.includes(text[end - 1])) {
    end--;
  }
  return text.slice(0, end);
}

/** The digest of a source: of its RFC 8785 text, which for a string is its JSON. */
export function sourceDigest(source: string): string {
  const text = JSON.stringify(normaliseSource(source));
  return `sha256:${sha256Hex(new TextEncoder().encode(text))}`;
}
