// What a view asks of the page that it stands in: a file saved, a line copied, the theme watched.

export function download(name, text) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type: "text/html" }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

// Copies and says how that went.
export function copyText(text, tell) {
  const refused = () => tell("The browser refused to copy; select the line and copy it by hand.");
  if (navigator.clipboard) navigator.clipboard.writeText(text).then(() => tell("Copied."), refused);
  else refused();
}

// Calls `changed` when JupyterLab or the system changes between light and dark; returns how to stop watching.
export function watchTheme(changed) {
  const theme = new MutationObserver(changed);
  for (const node of [document.documentElement, document.body]) theme.observe(node, { attributes: true, attributeFilter: ["data-jp-theme-light", "data-jp-theme-name"] });
  const system = matchMedia("(prefers-color-scheme: dark)");
  system.addEventListener("change", changed);
  return () => {
    theme.disconnect();
    system.removeEventListener("change", changed);
  };
}
