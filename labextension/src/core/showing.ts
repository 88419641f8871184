/** Whether an output still shows the text of its stamp; `core/showing.py` in the browser. */
import { squeezed } from './magicline';
import { ICall, IGeneration, IStamp } from './stamp';

/** Text whose control characters are visible, so that none acts on a terminal. */
export function printable(text: string): string {
  // eslint-disable-next-line no-control-regex
  return text.replace(/[\x00-\x08\x0b-\x1f\x7f-\x9f]/g, char => {
    return `\\x${char.charCodeAt(0).toString(16).padStart(2, '0')}`;
  });
}

function heading(generation: IGeneration, call: ICall): string {
  const parts: string[] = [];
  if (call.requests.length > 1) {
    parts.push(`prompt ${generation.prompt + 1}/${call.requests.length}`);
  }
  const n = call.requests[generation.prompt].seeds.length;
  if (n > 1) {
    parts.push(`completion ${generation.completion + 1}/${n}`);
  }
  return `[${parts.join(', ')}]`;
}

/** The texts of one call, with headings where there are several. */
export function generationsText(call: ICall): string {
  if (call.generations.length === 1) {
    return call.generations[0].text;
  }
  return call.generations.map(g => `${heading(g, call)}\n${g.text}`).join('\n\n');
}

/** The calls as a cell shows them: a try's texts in place of those it replaced. */
export function shownCalls(calls: readonly ICall[]): ICall[] {
  const shown: ICall[] = [];
  for (const call of calls) {
    const { attempt } = call;
    if (attempt === null || attempt.number === 1 || !shown.length) {
      shown.push(call);
      continue;
    }
    const first = shown[shown.length - 1];
    const generations = [...first.generations];
    attempt.standsFor.forEach((place, i) => {
      const { prompt, completion } = generations[place];
      generations[place] = { ...call.generations[i], prompt, completion };
    });
    shown[shown.length - 1] = { ...first, generations };
  }
  return shown;
}

/** Whether the texts that a cell shows hold those of its stamp; white space does not count. */
export function stillShown(stamp: IStamp, shown: readonly string[]): boolean {
  const texts = shown.map(squeezed).filter(text => text);
  return (
    !texts.length ||
    shownCalls(stamp.calls).every(call => {
      const expected = squeezed(printable(generationsText(call)));
      return texts.some(text => text.includes(expected));
    })
  );
}
