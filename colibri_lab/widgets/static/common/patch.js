// Markup into the page, with the focus kept.

// Puts markup in; the focus stays at the control that means the same: that of the same tag and data, or where what a button does changes with its
// state, the same data-keep.
export function patch(node, html) {
  if (node.painted === html) return;
  node.painted = html;
  const focused = node.contains(document.activeElement) && document.activeElement !== node ? document.activeElement : null;
  const keep = focused?.dataset.keep;
  const same = keep ? `[data-keep="${CSS.escape(keep)}"]` : focused && `${focused.tagName.toLowerCase()}${Object.entries(focused.dataset).filter(([key]) => !key.startsWith("lm")).map(([key, value]) => `[data-${key}="${CSS.escape(value)}"]`).join("")}`;
  node.innerHTML = html;
  if (focused) (node.querySelector(same) ?? node.closest("section[tabindex]"))?.focus({ preventScroll: true });
}
