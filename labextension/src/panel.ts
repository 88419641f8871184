import { Widget } from '@lumino/widgets';

import { ICellRow } from './core/protocol';
import { IStatus } from './core/status';
import { button, element } from './dom';

export interface IPanelActions {
  jump(cellId: string): void;
  acceptCell(cellId: string): void;
  acceptAll(): void;
  stampAll(): void;
}

/** What is shown: a notebook's name and status, null where no notebook is open. */
export interface IShown {
  readonly name: string;
  readonly status: IStatus;
}

export class DetLLMPanel extends Widget {
  constructor(private readonly actions: IPanelActions) {
    super();
    this.id = 'detllm-panel';
    this.addClass('jp-detllm-panel');
    this.title.label = 'detllm';
    this.title.caption = 'Stamps of the current notebook';
    this.node.setAttribute('role', 'region');
    this.node.setAttribute('aria-label', 'detllm: stamps of the current notebook');
    this.node.tabIndex = -1;
    this.node.append(this.body, this.message);
    this.show_(null);
  }

  /** Say what a command did. */
  say(text: string): void {
    this.message.textContent = text.slice(0, 300);
  }

  show_(shown: IShown | null): void {
    const focused = this.focusedKey();
    this.body.replaceChildren(...(shown ? this.content(shown) : [nothing()]));
    if (focused) {
      const again = [...this.body.querySelectorAll<HTMLElement>('[data-key]')];
      // A cell that was accepted has no such button any more: its name comes next.
      const keys = [focused, focused.replace(/^accept /, 'jump ')];
      const found = keys.map(key => again.find(node => node.dataset.key === key));
      found.find(node => node !== undefined)?.focus();
    }
  }

  /** Whoever opens the panel by keyboard goes on in it. */
  protected override onActivateRequest(): void {
    this.node.focus();
  }

  /** Which button has the focus: a refresh must not take it away. */
  private focusedKey(): string | undefined {
    const active = document.activeElement;
    return active instanceof HTMLElement && this.body.contains(active)
      ? active.dataset.key
      : undefined;
  }

  private content({ name, status }: IShown): Node[] {
    const out: Node[] = [
      element('h2', { class: 'jp-detllm-title', text: name.slice(0, 60) }),
      element('p', {
        class: 'jp-detllm-summary',
        text: status.text,
        attributes: { 'data-state': status.state }
      }),
      element('div', { class: 'jp-detllm-actions' }, this.stampAll(), this.acceptAll())
    ];
    for (const problem of [...status.notes, ...status.problems.slice(0, 5)]) {
      out.push(element('p', { class: 'jp-detllm-problem', text: problem }));
    }
    if (status.late.length) {
      const text = `too late to be in force: ${status.late.join(', ').slice(0, 160)}`;
      out.push(element('p', { class: 'jp-detllm-problem', text }));
    }
    const items = status.cells.map(cell => this.item(cell));
    if (items.length) {
      out.push(element('ol', { class: 'jp-detllm-cells' }, ...items));
    } else if (!status.notes.length) {
      out.push(nothing());
    }
    return out;
  }

  private stampAll(): HTMLElement {
    return button('Stamp new', () => this.actions.stampAll(), {
      attributes: {
        'data-key': 'stamp-all',
        title: 'Make stamps references where a cell has none or its source was changed'
      }
    });
  }

  private acceptAll(): HTMLElement {
    return button('Accept all', () => this.actions.acceptAll(), {
      attributes: {
        'data-key': 'accept-all',
        title: 'Accept the new generation of every cell as its reference'
      }
    });
  }

  private item(cell: ICellRow): HTMLElement {
    const { id, label } = cell;
    const head = element('div', { class: 'jp-detllm-head' });
    head.append(
      button(label, () => this.actions.jump(id), {
        class: 'jp-detllm-jump',
        attributes: { 'data-key': `jump ${id}`, title: 'Go to this cell' }
      }),
      element('span', {
        class: 'jp-detllm-verdict',
        text: cell.text,
        attributes: { 'data-standing': cell.standing }
      })
    );
    const out = element('li', { class: 'jp-detllm-cell' }, head, details(cell));
    if (cell.acceptable) {
      const accept = button('Accept as reference', () => this.actions.acceptCell(id), {
        attributes: {
          'data-key': `accept ${id}`,
          'aria-label': `Accept the new generation of ${label} as reference`
        }
      });
      out.append(accept);
    }
    return out;
  }

  private readonly body = element('div');
  private readonly message = element('p', {
    class: 'jp-detllm-message',
    attributes: { role: 'status' }
  });
}

function nothing(): HTMLElement {
  return element('p', { text: 'No cell of this notebook generates or carries a stamp.' });
}

function details(cell: ICellRow): HTMLElement {
  const list = element('dl', { class: 'jp-detllm-lines' });
  for (const [label, text] of cell.lines) {
    list.append(element('dt', { text: label }), element('dd', { text }));
  }
  return list;
}
