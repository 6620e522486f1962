// The selection: one ring with a halo on the data, and pointers on the axes.

export const ring = (x, y, w, h) =>
  `<rect x="${x - 1}" y="${y - 1}" width="${w + 2}" height="${h + 2}" rx="2" fill="none" stroke="var(--halo)" stroke-width="4" pointer-events="none"/><rect x="${x - 1}" y="${y - 1}" width="${w + 2}" height="${h + 2}" rx="2" fill="none" stroke="var(--sel)" stroke-width="2" pointer-events="none"/>`;

// A triangle on an axis that points right (">") or down ("v") at a row or column; its tip stands at x, y.
export const pointer = (x, y, way) => `<path d="${way === "v" ? `M${x - 5} ${y - 8}h10l-5 8Z` : `M${x - 8} ${y - 5}v10l8 -5Z`}" fill="var(--sel)" pointer-events="none"/>`;
