// Colours: the cividis table (256 values of matplotlib's, checked by tests/widgets/test_palette.py), eight expert colours per theme,
// and what a canvas needs to know of the style sheet.

const CIVIDIS =
  "00224e00234f00245100255300255400265600275800285900285b00295d002a5f002a61002b62002c64002c66002d68002e6a002e6c002f6d00306f" +
  "0030700031700031710132710533710833700c34700f357012357014367016377018376f1a386f1c396f1e3a6f203a6f213b6e233c6e243c6e263d6e" +
  "273e6e293f6e2a3f6d2b406d2d416d2e416d2f426d31436d32436d33446d34456c35456c36466c38476c39486c3a486c3b496c3c4a6c3d4a6c3e4b6c" +
  "3f4c6c404c6c414d6c424e6c434e6c444f6c45506c46516c47516c48526c49536c4a536c4b546c4c556c4d556c4e566c4f576c50576c51586d52596d" +
  "535a6d545a6d555b6d555c6d565c6d575d6d585e6d595e6e5a5f6e5b606e5c616e5d616e5e626e5e636f5f636f60646f61656f62656f636670646770" +
  "656870656870666970676a71686a71696b716a6c716b6d726c6d726c6e726d6f726e6f736f7073707173717274727274727374737475747475757575" +
  "7676767777767777777878777979777a7a787b7a787c7b787d7c787e7c787e7d787f7e78807f78817f78828079838179848279858279868379878478" +
  "8885788985788a86788b87788c88788d88788e89788f8a78908b78918b78928c78928d78938e78948e77958f779690779791779892779992779a9376" +
  "9b94769c95769d95769e96769f9775a09875a19975a29975a39a74a49b74a59c74a69c74a79d73a89e73a99f73aaa073aba072aca172ada272aea371" +
  "afa471b0a571b1a570b3a670b4a76fb5a86fb6a96fb7a96eb8aa6eb9ab6dbaac6dbbad6dbcae6cbdae6cbeaf6bbfb06bc0b16ac1b26ac2b369c3b369" +
  "c4b468c5b568c6b667c7b767c8b866c9b965cbb965ccba64cdbb63cebc63cfbd62d0be62d1bf61d2c060d3c05fd4c15fd5c25ed6c35dd7c45cd9c55c" +
  "dac65bdbc75adcc859ddc858dec958dfca57e0cb56e1cc55e2cd54e4ce53e5cf52e6d051e7d150e8d24fe9d34eead34cebd44bedd54aeed649efd748" +
  "f0d846f1d945f2da44f3db42f5dc41f6dd3ff7de3ef8df3cf9e03afbe138fce236fde334fee434fee535fee636fee838";

// Blue, brown-orange, green, rose, sky, olive-gold, violet, slate: told apart under full protan, deutan and tritan simulation.
const EXPERTS = {
  light: ["#1077b8", "#9b5815", "#085336", "#cb7188", "#399eb7", "#8f8c3b", "#431e7b", "#636a78"],
  dark: ["#9d9ef1", "#bc6d2b", "#3ea481", "#f1b5b1", "#88d0ff", "#bca439", "#856fd6", "#dbeaf8"],
};
const NO_SLOT = { light: "#9aa0a8", dark: "#6f757d" };
export const SLOTS = 8;

const cividis = (i) => "#" + CIVIDIS.slice(6 * i, 6 * i + 6);

const channel = (hex, i) => {
  const c = parseInt(hex.slice(i, i + 2), 16) / 255;
  return c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
};
const luminance = (hex) => 0.2126 * channel(hex, 1) + 0.7152 * channel(hex, 3) + 0.0722 * channel(hex, 5);
// Ink on a filled colour: black or white, whichever keeps 4.5 : 1.
export const inkOn = (hex) => (luminance(hex) > 0.19 ? "#111111" : "#ffffff");

// JupyterLab says on the body whether its theme is light; elsewhere the system decides.
export const isDark = (element) => {
  const marked = element.closest("[data-jp-theme-light]") || document.querySelector("[data-jp-theme-light]");
  return marked ? marked.dataset.jpThemeLight === "false" : matchMedia("(prefers-color-scheme: dark)").matches;
};

const STYLE = ["card", "sunk", "line", "line2", "ink", "ink2", "sel", "halo", "mark", "markp", "warn", "ui", "mono"];

// The palette of one theme. Strong values stand away from the page: dark on a light page, bright on a dark one.
export function makePalette(root) {
  const dark = root.dataset.theme === "dark";
  const theme = dark ? "dark" : "light";
  const style = getComputedStyle(root);
  const ramp = Array.from({ length: 256 }, (_, i) => cividis(dark ? i : 255 - i));
  const inks = ramp.map(inkOn);
  const step = (v) => Math.max(0, Math.min(255, Math.round(v * 255)));
  // The same ramp as pixels of an image: red, green, blue, alpha in memory order.
  const pixels = new Uint32Array(new Uint8Array(ramp.flatMap((hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16)).concat(255))).buffer);
  const floor = dark ? 0.25 : 0.1; // sparse maps leave the weakest part of the scale to the empty cells
  const palette = {
    dark,
    experts: EXPERTS[theme],
    none: NO_SLOT[theme],
    tint: dark ? 0.3 : 0.24,
    of: (v) => ramp[step(v)], // 0 … 1, dense maps
    inkOf: (v) => inks[step(v)],
    sparse: (v) => ramp[step(floor + (1 - floor) * Math.min(1, Math.max(0, v)))],
    pixelOf: (v) => pixels[step(v)],
    pixelSparse: (v) => pixels[step(floor + (1 - floor) * Math.min(1, v))],
    edge: dark ? "rgba(255,255,255,.3)" : "rgba(0,0,0,.3)",
  };
  for (const name of STYLE) palette[name] = style.getPropertyValue("--" + name).trim();
  // A canvas cannot read nested custom properties of fonts, so take what the browser made of them.
  palette.ui = style.fontFamily;
  return palette;
}

export const withAlpha = (hex, alpha) => hex + Math.round(alpha * 255).toString(16).padStart(2, "0");
