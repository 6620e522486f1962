// Markup into the page, with the focus kept.

// Puts markup in; the focus stays at the control that means the same.
export function patch(node, html) {
  if (node.painted === html) return;
  node.painted = html;
  const focused = node.contains(document.activeElement) && document.activeElement !== node ? document.activeElement : null;
  const same = focused && `${focused.tagName.toLowerCase()}${Object.entries(focused.dataset).filter(([key]) => !key.startsWith("lm")).map(([key, value]) => `[data-${key}="${CSS.escape(value)}"]`).join("")}`;
  node.innerHTML = html;
  if (focused) (node.querySelector(same) ?? node.closest("section[tabindex]"))?.focus({ preventScroll: true });
}
