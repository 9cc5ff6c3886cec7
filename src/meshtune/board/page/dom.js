// Elements from values. Text becomes text nodes and nothing else: what a record, a log or a model says is never markup.

const SVG = 'http://www.w3.org/2000/svg';
const SVG_TAGS = new Set(['svg', 'path', 'line', 'rect', 'circle', 'text', 'g', 'polyline', 'polygon', 'title', 'desc']);

// h('button', {class: 'primary', onclick: save}, t('save')): a prop that is a function listens, false and null leave
// an attribute out, true sets it empty. `value`, `checked`, `selected` and `disabled` are properties.
export function h(tag, props = {}, ...children) {
  return build(document.createElement(tag), props, children);
}

// The same for elements of SVG.
export function svg(tag, props = {}, ...children) {
  if (!SVG_TAGS.has(tag)) throw new Error(`not an element of SVG: ${tag}`);
  return build(document.createElementNS(SVG, tag), props, children);
}

// Replaces what an element holds.
export function fill(element, ...children) {
  element.replaceChildren(...nodes(children));
  return element;
}

function build(element, props, children) {
  for (const [name, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === 'function') element.addEventListener(name.slice(2), value);
    else if (name.startsWith('on')) throw new Error(`a listener must be a function: ${name}`);
    else if (['value', 'checked', 'selected', 'disabled'].includes(name)) element[name] = value;
    else if (['href', 'src'].includes(name)) element.setAttribute(name, local(value));
    else element.setAttribute(name, value === true ? '' : String(value));
  }
  element.append(...nodes(children));
  return element;
}

function nodes(children) {
  return children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false)
    .map((child) => (child instanceof Node ? child : document.createTextNode(String(child))));
}

// An address of this board: never a script, never another host.
function local(address) {
  const url = new URL(address, document.baseURI);
  if (url.origin !== location.origin && url.protocol !== 'blob:') throw new Error(`not an address of this board: ${address}`);
  return address;
}
