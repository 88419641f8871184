/** Elements whose text is text: nothing from a notebook is ever parsed as HTML. */

export interface IProperties {
  readonly class?: string;
  readonly text?: string;
  readonly attributes?: { readonly [name: string]: string };
  readonly onClick?: () => void;
}

export function element<K extends keyof HTMLElementTagNameMap>(
  tag: K,
  properties: IProperties = {},
  ...children: Node[]
): HTMLElementTagNameMap[K] {
  const node = document.createElement(tag);
  if (properties.class) {
    node.className = properties.class;
  }
  if (properties.text !== undefined) {
    node.textContent = properties.text;
  }
  for (const [name, value] of Object.entries(properties.attributes ?? {})) {
    node.setAttribute(name, value);
  }
  if (properties.onClick) {
    node.addEventListener('click', properties.onClick);
  }
  node.append(...children);
  return node;
}

/** A push button. */
export function button(text: string, onClick: () => void, properties: IProperties = {}) {
  const attributes = { type: 'button', ...properties.attributes };
  return element('button', { ...properties, text, attributes, onClick });
}
