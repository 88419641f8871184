/** What a cell's `%%detgen` line says, read without running it; as in Python. */

// White space as Python's str.isspace() has it, which is not what \s matches here.
const SPACE = ' \\t\\n\\r\\v\\f\\x1c-\\x1f\\x85\\xa0\\u1680\\u2000-\\u200a\\u2028\\u2029\\u202f\\u205f\\u3000';
const MAGIC = new RegExp(`^[${SPACE}]*%%detgen(?![\\p{L}\\p{N}_])([^\\n]*)`, 'u');
const NAME = new RegExp(`^[${SPACE}]+([A-Za-z_][\\p{L}\\p{N}_.-]*)(?=[${SPACE}]|$)`, 'u');
const SPACES = new RegExp(`[${SPACE}]+`, 'gu');

/** The text without any white space. */
export function squeezed(text: string): string {
  return text.replace(SPACES, '');
}

/** What follows `%%detgen` on its line; null where a cell has none. */
export function magicLine(source: string): string | null {
  const found = MAGIC.exec(source);
  return found === null ? null : found[1];
}

/** The name of the cell, "" where its line begins with no name. */
export function lineName(line: string): string {
  return NAME.exec(line)?.[1] ?? '';
}

/** The last value of an option; null without one, or on a line that the magic refuses. */
export function lineOption(line: string, option: string): string | null {
  const words = line.includes(option) ? splitWords(line) : null;
  let found: string | null = null;
  words?.forEach((word, i) => {
    if (word === option) {
      found = words[i + 1] ?? null;
    } else if (word.startsWith(`${option}=`)) {
      found = word.slice(option.length + 1);
    }
  });
  return found;
}

/** Words as a POSIX shell quotes them; null where a quote or an escape is open. */
export function splitWords(line: string): string[] | null {
  const words: string[] = [];
  let word: string | null = null;
  let quote = '';
  const chars = [...line];
  for (let i = 0; i < chars.length; i++) {
    const char = chars[i];
    if (quote === "'" ? char === "'" : quote === '"' && char === '"') {
      quote = '';
    } else if (quote === "'") {
      word += char;
    } else if (char === '\\') {
      const next = chars[++i];
      if (next === undefined) {
        return null;
      }
      const kept = quote === '"' && next !== '"' && next !== '\\';
      word = (word ?? '') + (kept ? `\\${next}` : next);
    } else if (quote) {
      word += char;
    } else if (char === "'" || char === '"') {
      quote = char;
      word ??= '';
    } else if (' \t\r\n'.includes(char)) {
      if (word !== null) {
        words.push(word);
      }
      word = null;
    } else {
      word = (word ?? '') + char;
    }
  }
  if (quote) {
    return null;
  }
  return word === null ? words : [...words, word];
}
