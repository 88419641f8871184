/** Lines about a cell for people: text only, one line each, nothing that steers a display. */
import { IDivergence, IPair } from './core/compare';
import { marginClass } from './core/evidence';
import { IFieldDiff, fieldText } from './core/fingerprint';
import { IGeneration, isGreedy } from './core/stamp';
import { utf8 } from './core/canonical';
import { IOutcome } from './core/verdict';

export interface ILine {
  readonly label: string;
  readonly text: string;
}

const WIDE = 120;
const NARROW = 40;
const MOST_FIELDS = 3;
const KEPT = ' \u3000\u200d\ufe0e\ufe0f';
const NAMED: { [char: string]: string } = { '\n': '\\n', '\r': '\\r', '\t': '\\t' };

/** The text with everything that is not visible escaped. */
export function visible(text: string): string {
  return text.replace(/[\p{C}\p{Z}]/gu, char => {
    if (KEPT.includes(char)) {
      return char;
    }
    const code = char.codePointAt(0) ?? 0;
    const hex = code.toString(16);
    return NAMED[char] ?? (code < 256 ? `\\x${hex.padStart(2, '0')}` : `\\u{${hex}}`);
  });
}

/** The head of a text, on one line, with `...` where it was cut. */
export function clip(text: string, length: number): string {
  const chars = [...visible(text.slice(0, 4 * length))];
  const whole = chars.length <= length && text.length <= 4 * length;
  return whole ? chars.join('') : `${chars.slice(0, length - 3).join('')}...`;
}

function clipLeft(text: string, length: number): string {
  const chars = [...visible(text.slice(-4 * length))];
  const whole = chars.length <= length && text.length <= 4 * length;
  return whole ? chars.join('') : `...${chars.slice(chars.length - length + 3).join('')}`;
}

const decoder = new TextDecoder('utf-8');

function piece(generation: IGeneration, from: number, to: number): string {
  const data = utf8(generation.text);
  const at = (index: number) =>
    index < generation.offsets.length ? generation.offsets[index] : data.length;
  return decoder.decode(data.subarray(at(from), Math.max(at(from), at(to))));
}

function side(generation: IGeneration, position: number): string {
  if (position >= generation.tokenIds.length) {
    return `ended (${clip(generation.finishReason, NARROW)})`;
  }
  const token = clip(piece(generation, position, position + 1), 32);
  const after = clip(piece(generation, position + 1, generation.tokenIds.length), NARROW);
  const id = generation.tokenIds[position];
  return `"${token}" (token id ${id})${after ? `, then "${after}"` : ''}`;
}

function number(value: number): string {
  return Number.isFinite(value) ? String(Number(value.toPrecision(4))) : String(value);
}

function marginText(pair: IPair, divergence: IDivergence): string {
  const { margin, actualMargin, runnerUpTaken } = divergence;
  if (margin === null) {
    return 'not recorded for this token';
  }
  // Noise decides between sampled tokens: their margin is no measure of confidence.
  const kind = isGreedy(pair.request) ? ` (${marginClass(margin)})` : ', before sampling noise';
  const now =
    actualMargin !== null && Number.isFinite(actualMargin) ? `, now ${number(actualMargin)}` : '';
  const other =
    runnerUpTaken === null
      ? ''
      : `; the other token is ${runnerUpTaken ? '' : 'not '}the recorded runner-up`;
  return `${number(margin)} nats${kind}${now}${other}`;
}

function cause(fields: readonly IFieldDiff[]): ILine[] {
  if (!fields.length) {
    return [{ label: 'cause', text: 'none differ: every numerics field is equal' }];
  }
  const lines = fields.slice(0, MOST_FIELDS).map((diff, index) => ({
    label: index ? '' : 'cause',
    text:
      `${clip(diff.name, NARROW)}: ${clip(fieldText(diff.left), NARROW)} -> ` +
      clip(fieldText(diff.right), NARROW)
  }));
  if (fields.length > MOST_FIELDS) {
    lines.push({ label: '', text: `and ${fields.length - MOST_FIELDS} more` });
  }
  return lines;
}

/** What differs, why, and where first; nothing for a match. */
export function explain(outcome: IOutcome): ILine[] {
  if (outcome.verdict === 'match') {
    return [];
  }
  if (outcome.verdict !== 'drift' && outcome.verdict !== 'diverged') {
    return outcome.reasons.slice(0, 4).map(text => ({ label: 'why', text: clip(text, WIDE) }));
  }
  const lines = cause(outcome.facts.fields);
  for (const text of outcome.facts.possibleCauses) {
    lines.push({ label: '', text: clip(text, WIDE) });
  }
  const comparison = outcome.facts.comparison;
  const pair = comparison?.first;
  if (!comparison || !pair) {
    return lines;
  }
  return [...lines, ...difference(pair, comparison.pairs)];
}

function difference(pair: IPair, pairs: readonly IPair[]): ILine[] {
  const differing = pairs.filter(other => !other.tokensEqual).length;
  const of = `generation ${pairs.indexOf(pair) + 1} of ${pairs.length}`;
  const rest = pairs.length > 1 ? ` (${differing} of ${pairs.length} differ)` : '';
  const total = pair.reference.tokenIds.length;
  if (pair.divergence === null) {
    return [
      { label: 'where', text: `${of}, all ${total} tokens are equal${rest}` },
      { label: 'recorded', text: `finished with ${clip(pair.reference.finishReason, NARROW)}` },
      { label: 'now', text: `finished with ${clip(pair.actual.finishReason, NARROW)}` }
    ];
  }
  const at = pair.divergence.position;
  const before = clipLeft(piece(pair.reference, 0, at), 60);
  return [
    { label: 'where', text: `${of}, token ${at + 1} of ${total}${rest}` },
    { label: 'context', text: before ? `"${before}"` : '(at the start of the text)' },
    { label: 'recorded', text: side(pair.reference, at) },
    { label: 'now', text: side(pair.actual, at) },
    { label: 'margin', text: marginText(pair, pair.divergence) }
  ];
}
