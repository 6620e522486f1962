// In words, and the cache of keys and values.
export const keys = {
  name: "keys",
  html: (panel) => (panel ? "" : '<p class="q">Nothing was measured.</p>'),
};
