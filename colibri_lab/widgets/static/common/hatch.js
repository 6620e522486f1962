// Two runs: the first in solid ink, the second hatched.

export const hatch = (id) => `<defs><pattern id="${id}" width="5" height="5" patternUnits="userSpaceOnUse" patternTransform="rotate(45)"><path d="M0 0V5" stroke="var(--ink)" stroke-width="1.4"/></pattern></defs>`;
export const swatch = (id, hatched) => `<svg width="14" height="10" aria-hidden="true">${hatched ? `${hatch(id)}<rect x=".75" y=".75" width="12.5" height="8.5" fill="url(#${id})" stroke="var(--ink)" stroke-width="1.2"/>` : '<rect width="14" height="10" fill="var(--ink)" fill-opacity=".8"/>'}</svg>`;
