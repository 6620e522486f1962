// One drawing for each kind of value that is no ordinary number; ink and page colour only, so they hold in both themes.
// Every mark is a list of strokes and fills in a unit box, drawn on a canvas or written as SVG for the key.

const CROSS = [[-1, -1, 1, 1], [1, -1, -1, 1]];

export function drawMark(ctx, palette, kind, x, y, w, h) {
  const cx = x + w / 2;
  const cy = y + h / 2;
  const r = Math.min(w, h) * 0.3;
  ctx.save();
  ctx.lineWidth = 1.5;
  ctx.strokeStyle = palette.mark;
  if (kind === "nan") {
    ctx.fillStyle = palette.markp;
    ctx.fillRect(x, y, w, h);
    ctx.strokeRect(x + 0.75, y + 0.75, w - 1.5, h - 1.5);
    ctx.beginPath();
    for (const [a, b, c, d] of CROSS) {
      ctx.moveTo(cx + a * r, cy + b * r);
      ctx.lineTo(cx + c * r, cy + d * r);
    }
    ctx.stroke();
  } else if (kind === "+inf" || kind === "-inf") {
    const up = kind === "+inf" ? 1 : -1;
    ctx.fillStyle = palette.mark;
    ctx.fillRect(x, y, w, h);
    ctx.fillStyle = palette.markp;
    ctx.beginPath();
    ctx.moveTo(cx - 1.2 * r, cy + up * 0.8 * r);
    ctx.lineTo(cx + 1.2 * r, cy + up * 0.8 * r);
    ctx.lineTo(cx, cy - up * r);
    ctx.fill();
  } else if (kind === "clip") {
    if (Math.min(w, h) < 8) {
      ctx.fillStyle = palette.markp;
      ctx.fillRect(Math.round(cx - 1), Math.round(cy - 1), 2, 2);
    } else {
      ctx.fillStyle = palette.markp;
      ctx.lineWidth = 1;
      ctx.beginPath();
      ctx.moveTo(x + w - 6, y);
      ctx.lineTo(x + w, y);
      ctx.lineTo(x + w, y + 6);
      ctx.closePath();
      ctx.fill();
      ctx.stroke();
    }
  } else if (kind === "unknown") {
    ctx.strokeStyle = palette.line2;
    ctx.lineWidth = 1;
    ctx.setLineDash([1, 2]);
    ctx.strokeRect(x + 0.5, y + 0.5, w - 1, h - 1);
    if (w >= 8 && h >= 10) {
      ctx.fillStyle = palette.ink2;
      ctx.font = `11px ${palette.ui}`;
      ctx.textAlign = "center";
      ctx.fillText("?", cx, cy + 4);
    }
  } else if (kind === "cut") {
    ctx.beginPath();
    ctx.moveTo(x, y);
    for (let i = 0; i * 6 < h; i++) ctx.lineTo(x + (i % 2 ? 0 : w), y + Math.min(h, 6 * (i + 1)));
    ctx.stroke();
  }
  ctx.restore();
}

const BOX = '<rect x="1" y="1" width="14" height="14" fill="var(--mark)"/>';
const SHAPES = {
  nan: '<rect x="1.75" y="1.75" width="12.5" height="12.5" fill="var(--markp)" stroke="var(--mark)" stroke-width="1.5"/><path d="M4 4L12 12M12 4L4 12" stroke="var(--mark)" stroke-width="2"/>',
  "+inf": BOX + '<path d="M3.5 11.5H12.5L8 4.5Z" fill="var(--markp)"/>',
  "-inf": BOX + '<path d="M3.5 4.5H12.5L8 11.5Z" fill="var(--markp)"/>',
  clip: '<rect x="1" y="1" width="14" height="14" fill="var(--strong)"/><path d="M8 1H15V8Z" fill="var(--markp)" stroke="var(--mark)"/>',
  unknown: '<rect x="1.5" y="1.5" width="13" height="13" fill="none" stroke="var(--line2)" stroke-dasharray="1 2"/><text x="8" y="12" text-anchor="middle">?</text>',
  subnormal: '<rect x="1.5" y="1.5" width="13" height="13" fill="none" stroke="var(--mark)" stroke-dasharray="2 2"/><path d="M4 11.5H12" stroke="var(--mark)" stroke-width="2"/>',
  finite: '<rect x="1" y="1" width="14" height="14" fill="var(--sunk)"/><text x="8" y="11" text-anchor="middle">·</text>',
  near: '<rect x="2" y="2" width="12" height="12" fill="none" stroke="var(--warn)" stroke-width="2"/><text x="8" y="12" text-anchor="middle" style="fill:var(--warn);font-weight:700">!</text>',
  cut: '<path d="M6 0L11 4L6 8L11 12L6 16" fill="none" stroke="var(--mark)" stroke-width="1.5"/>',
};

// A mark as SVG in a box of any size; a pale one is of a value that was passed on.
export function markAt(kind, x, y, w, h, pale = false) {
  if (kind === "clip") return `<path d="M${x + w - 8} ${y}H${x + w}V${y + 8}Z" fill="var(--markp)" stroke="var(--mark)" stroke-width="1.3"/>`;
  const [cx, cy] = [x + w / 2, y + h / 2];
  const r = Math.min(w, h) * 0.3;
  if (kind === "subnormal") return `<rect x="${x + 0.5}" y="${y + 0.5}" width="${w - 1}" height="${h - 1}" fill="none" stroke="var(--mark)" stroke-dasharray="2 2"/><path d="M${cx - r} ${cy + r}h${2 * r}" stroke="var(--mark)" stroke-width="2"/>`;
  const box = pale ? `<rect x="${x + 0.5}" y="${y + 0.5}" width="${w - 1}" height="${h - 1}" fill="var(--sunk)" stroke="var(--line2)"/>` : "";
  if (Math.min(w, h) < 9) return pale ? `<rect x="${x}" y="${y}" width="${w}" height="${h}" fill="var(--mark)" fill-opacity="${kind === "nan" ? 0.45 : 0.25}"/>` : `<rect x="${x}" y="${y}" width="${w}" height="${h}" fill="var(--mark)"/>`;
  if (kind === "nan") {
    const cross = (s, width, colour) => `<path d="M${cx - s} ${cy - s}L${cx + s} ${cy + s}M${cx + s} ${cy - s}L${cx - s} ${cy + s}" stroke="${colour}" stroke-width="${width}"/>`;
    return pale ? box + cross(r * 0.7, 1.3, "var(--mark)") : `<rect x="${x}" y="${y}" width="${w}" height="${h}" fill="var(--mark)"/>${cross(r, 2.2, "var(--markp)")}`;
  }
  if (kind === "+inf" || kind === "-inf") {
    const up = kind === "+inf" ? 1 : -1;
    const full = `<rect x="${x}" y="${y}" width="${w}" height="${h}" fill="var(--mark)"/>`;
    return `${pale ? box : full}<path d="M${cx - r * 1.2} ${cy + up * r * 0.8}H${cx + r * 1.2}L${cx} ${cy - up * r}Z" fill="var(--mark${pale ? "" : "p"})"/>`;
  }
  return "";
}

export const markSvg = (kind) => `<svg width="16" height="16" viewBox="0 0 16 16" aria-hidden="true">${SHAPES[kind]}</svg>`;

// `[kind, words, how many]` as a key; what does not occur is not listed.
export const markKey = (entries) =>
  entries
    .filter(([, , n]) => n > 0)
    .map(([kind, words, n]) => `<span class="mk">${markSvg(kind)}${words} (${n.toLocaleString("en")})</span>`)
    .join("");
