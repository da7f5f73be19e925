// SPDX-License-Identifier: Apache-2.0
// Open every page of site/ in headless Chromium, light and dark: no error in the console, no finding of axe,
// nothing wider than the window at 400 pixels. Called by scripts/axe, which installs what it imports.
import { readFileSync, readdirSync } from "node:fs";
import { createRequire } from "node:module";
import { resolve } from "node:path";

const require = createRequire(`${process.env.MODULES}/`);
const puppeteer = require("puppeteer-core");
const axe = readFileSync(require.resolve("axe-core/axe.min.js"), "utf8");
const site = resolve("site");
const chosen = process.argv.slice(2);
const pages = readdirSync(site, { recursive: true })
  .filter((path) => path.endsWith(".html") && path !== "404.html")
  .filter((path) => !chosen.length || chosen.includes(path))
  .sort();
const browser = await puppeteer.launch({
  executablePath: process.env.CHROMIUM,
  args: ["--no-sandbox", "--allow-file-access-from-files"],
});
let findings = 0;
const tell = (path, scheme, text) => {
  findings += 1;
  console.log(`${path} (${scheme}): ${text}`);
};
for (const scheme of ["light", "dark"]) {
  // A context of its own: the theme keeps what it showed first, whatever is preferred later.
  const context = await browser.createBrowserContext();
  const wanted = { light: "default", dark: "slate" }[scheme];
  for (const path of pages) {
    const page = await context.newPage();
    page.on("pageerror", (error) => tell(path, scheme, `error: ${error.message}`));
    page.on("console", (said) => {
      if (said.type() === "error") tell(path, scheme, `console: ${said.text()}`);
    });
    await page.setViewport({ width: 400, height: 900 });
    await page.emulateMediaFeatures([
      { name: "prefers-color-scheme", value: scheme },
      { name: "prefers-reduced-motion", value: "reduce" },
    ]);
    await page.goto(`file://${site}/${path}`, { waitUntil: "load" });
    const wide = await page.evaluate(() => document.documentElement.scrollWidth);
    if (wide > 400) tell(path, scheme, `${wide} pixels wide in a window of 400`);
    await page.setViewport({ width: 1600, height: 900 });
    await page.reload({ waitUntil: "load" });
    await new Promise((done) => setTimeout(done, 600)); // the theme makes what scrolls a stop of the Tab key
    const shown = await page.evaluate(() => document.body.dataset.mdColorScheme);
    if (shown !== wanted) tell(path, scheme, `shown as ${shown}`);
    await page.evaluate(axe);
    const { violations } = await page.evaluate(() =>
      axe.run(document, { runOnly: ["wcag2a", "wcag2aa", "wcag21aa"] }),
    );
    for (const { id, help, nodes } of violations)
      tell(path, scheme, `${id}: ${help} (${nodes.length}): ${nodes[0].html.slice(0, 120)}`);
    await page.close();
  }
}
const page = await browser.newPage();
await page.goto(`file://${site}/index.html?q=hybrid`, { waitUntil: "load" });
await page
  .waitForSelector(".md-search-result__item", { timeout: 10000 })
  .catch(() => tell("index.html", "light", "a search finds nothing"));
await browser.close();
console.log(`${pages.length} pages, light and dark: ${findings} findings`);
process.exit(findings ? 1 : 0);
