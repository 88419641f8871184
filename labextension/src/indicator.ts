import { Widget } from '@lumino/widgets';

import { IStatus, WAITING } from './core/status';
import { button, element } from './dom';

const MOST_LINES = 12;

function hint(status: IStatus): string {
  const lines = status.cells.map(cell => `${cell.label}: ${cell.text}`);
  if (lines.length > MOST_LINES) {
    lines.splice(MOST_LINES, lines.length, `and ${lines.length - MOST_LINES} more`);
  }
  if (status.late.length) {
    lines.push(`too late: ${status.late.join(', ').slice(0, 80)}`);
  }
  lines.push(...status.notes);
  return [...lines, 'Click for details'].join('\n');
}

/** One line of text that opens the panel; the dot's colour only repeats the text. */
export class Indicator extends Widget {
  /** Of several that show the same, one is `live`: screen readers announce its changes. */
  constructor(open: () => void, live: boolean) {
    const label = element('span', { class: 'jp-detllm-label' });
    const dot = element('span', { class: 'jp-detllm-dot', attributes: { 'aria-hidden': 'true' } });
    const attributes = { 'aria-live': live ? 'polite' : 'off' };
    const node = button('', open, { class: 'jp-detllm-status', attributes });
    node.append(dot, label);
    super({ node });
    this.label = label;
    this.show_(WAITING);
  }

  show_(status: IStatus): void {
    const text = `detllm: ${status.text}`;
    if (this.label.textContent !== text) {
      this.label.textContent = text;
    }
    this.node.dataset.state = status.state;
    this.node.title = hint(status);
  }

  private readonly label: HTMLElement;
}
