import { JupyterFrontEnd, JupyterFrontEndPlugin } from '@jupyterlab/application';
import { ICommandPalette, IToolbarWidgetRegistry } from '@jupyterlab/apputils';
import { DocumentRegistry } from '@jupyterlab/docregistry';
import { INotebookModel, INotebookTracker, NotebookPanel } from '@jupyterlab/notebook';
import { ISettingRegistry } from '@jupyterlab/settingregistry';
import { ServerConnection } from '@jupyterlab/services';
import { IStatusBar } from '@jupyterlab/statusbar';
import { Signal } from '@lumino/signaling';

import { COMMANDS, cellIdOf, listen, runIn } from './commands';
import * as core from './core';
import { Indicator } from './indicator';
import { JudgeClient } from './judge';
import { DetLLMPanel } from './panel';
import { NotebookStamper, StampPolicy } from './stamper';

const ID = 'jupyter-detllm:plugin';
const CATEGORY = 'Notebook Operations';

type Context = DocumentRegistry.IContext<INotebookModel>;

/** The stamper of every open notebook: views of one document share it. */
export const stampers = new WeakMap<Context, NotebookStamper>();

let stampPolicy: StampPolicy = 'new';

function stamperOf(panel: NotebookPanel): NotebookStamper {
  const found = stampers.get(panel.context);
  if (found) {
    return found;
  }
  const client = new JudgeClient(ServerConnection.makeSettings());
  const made = new NotebookStamper(panel.context, client, () => stampPolicy);
  stampers.set(panel.context, made);
  return made;
}

function policyOf(value: unknown): StampPolicy {
  return value === 'all' || value === 'off' ? value : 'new';
}

async function followSettings(registry: ISettingRegistry): Promise<void> {
  const settings = await registry.load(ID);
  const read = () => {
    stampPolicy = policyOf(settings.get('stampPolicy').composite);
  };
  settings.changed.connect(read);
  read();
}

/** Everything that needs the application, made once. */
class Surface {
  constructor(
    private readonly app: JupyterFrontEnd,
    private readonly tracker: INotebookTracker
  ) {
    tracker.widgetAdded.connect((_, panel) => void stamperOf(panel));
    tracker.forEach(panel => void stamperOf(panel));
    tracker.currentChanged.connect(() => this.follow());
    this.follow();
  }

  readonly openPanel = (): void => {
    if (!this.panel.isAttached) {
      this.app.shell.add(this.panel, 'right', { rank: 900 });
    }
    this.app.shell.activateById(this.panel.id);
    this.update();
  };

  addCommands(palette: ICommandPalette | null): void {
    const labels: [string, string][] = [
      [COMMANDS.acceptCell, 'detllm: Accept New Generation as Reference (This Cell)'],
      [COMMANDS.acceptAll, 'detllm: Accept New Generations as References (All Cells)'],
      [COMMANDS.stampAll, 'detllm: Stamp What Has No Reference']
    ];
    const { commands } = this.app;
    const isEnabled = () => this.tracker.currentWidget !== null;
    for (const [id, label] of labels) {
      commands.addCommand(id, { label, isEnabled, execute: args => this.run(id, cellIdOf(args)) });
    }
    commands.addCommand(COMMANDS.openPanel, {
      label: 'detllm: Show Stamps of the Notebook',
      execute: this.openPanel
    });
    for (const command of Object.values(COMMANDS)) {
      palette?.addItem({ command, category: CATEGORY });
    }
  }

  addToToolbar(toolbar: IToolbarWidgetRegistry): void {
    toolbar.addFactory<NotebookPanel>('Notebook', 'detllm-status', panel => {
      const indicator = new Indicator(this.openPanel, true);
      const stamper = stamperOf(panel);
      const show = () => indicator.show_(stamper.status);
      stamper.changed.connect(show);
      indicator.disposed.connect(() => void stamper.changed.disconnect(show));
      show();
      return indicator;
    });
  }

  addToStatusBar(statusBar: IStatusBar): void {
    const active = new Signal<this, void>(this);
    this.tracker.currentChanged.connect(() => active.emit());
    this.app.shell.currentChanged?.connect(() => active.emit());
    statusBar.registerStatusItem('jupyter-detllm:status', {
      item: this.indicator,
      align: 'right',
      rank: 90,
      isActive: () => {
        const { currentWidget } = this.tracker;
        return currentWidget !== null && this.app.shell.currentWidget === currentWidget;
      },
      activeStateChanged: active
    });
  }

  answerWidgets(): void {
    listen({
      panelOf: node => this.tracker.find(panel => panel.node.contains(hostOf(node))) ?? null,
      stamperOf,
      openPanel: this.openPanel
    });
  }

  private async run(command: string, cellId: string | undefined | null): Promise<unknown> {
    const panel = this.tracker.currentWidget;
    if (panel === null || cellId === null) {
      return null;
    }
    const result = await runIn(panel, stamperOf(panel), command, cellId);
    if (result) {
      this.panel.say(result.text);
      if (!result.ok) {
        this.openPanel();
      }
    }
    return result;
  }

  private follow(): void {
    this.followed?.changed.disconnect(this.update, this);
    const panel = this.tracker.currentWidget;
    this.followed = panel ? stamperOf(panel) : null;
    this.followed?.changed.connect(this.update, this);
    this.panel.say('');
    this.update();
  }

  private update(): void {
    const stamper = this.followed;
    if (stamper) {
      this.indicator.show_(stamper.status);
    }
    if (this.panel.isVisible) {
      const name = stamper?.context.path.split('/').pop() ?? '';
      this.panel.show_(stamper ? { name, status: stamper.status } : null);
    }
  }

  private jump(cellId: string): void {
    const notebook = this.tracker.currentWidget?.content;
    const index = notebook?.widgets.findIndex(cell => cell.model.id === cellId) ?? -1;
    if (!notebook || index < 0) {
      return;
    }
    notebook.activeCellIndex = index;
    notebook.deselectAll();
    void notebook.scrollToItem(index, 'smart');
    notebook.activate();
  }

  private followed: NotebookStamper | null = null;
  private readonly indicator = new Indicator(this.openPanel, false);
  private readonly panel = new DetLLMPanel({
    jump: id => this.jump(id),
    acceptCell: id => void this.run(COMMANDS.acceptCell, id),
    acceptAll: () => void this.run(COMMANDS.acceptAll, undefined),
    stampAll: () => void this.run(COMMANDS.stampAll, undefined)
  });
}

/** The node itself, or the host of the shadow tree it stands in. */
function hostOf(node: Node): Node {
  const root = node.getRootNode();
  return root instanceof ShadowRoot ? hostOf(root.host) : node;
}

const plugin: JupyterFrontEndPlugin<void> = {
  id: ID,
  description: 'Keeps stamps of generations as references, compares them, and shows the verdicts.',
  autoStart: true,
  requires: [INotebookTracker],
  optional: [IToolbarWidgetRegistry, IStatusBar, ICommandPalette, ISettingRegistry],
  activate: async (
    app: JupyterFrontEnd,
    tracker: INotebookTracker,
    toolbar: IToolbarWidgetRegistry | null,
    statusBar: IStatusBar | null,
    palette: ICommandPalette | null,
    settings: ISettingRegistry | null
  ) => {
    const surface = new Surface(app, tracker);
    surface.addCommands(palette);
    surface.answerWidgets();
    if (toolbar) {
      surface.addToToolbar(toolbar);
    }
    if (statusBar) {
      surface.addToStatusBar(statusBar);
    }
    if (settings) {
      await followSettings(settings);
    }
  }
};

export { core };
export default plugin;
