// Opens pages of the built site in Chromium with the network off; files are handed over by this program alone, so that
// whatever else a page asks for is seen. Screenshots go beside the site.
//     node tests/browser/look_at_site.mjs FOLDER          (FOLDER/site is what mkdocs built)
import { createRequire } from "node:module";
import { existsSync, readFileSync, readdirSync, statSync } from "node:fs";
import { extname, join, resolve } from "node:path";

const folder = resolve(process.argv[2]), site = join(folder, "site");
const { chromium } = createRequire(join(folder, "x.js"))("playwright-core");
const program = ["/usr/bin/chromium", "/usr/bin/chromium-browser", "/usr/bin/google-chrome"].find(path => existsSync(path));
const browser = await chromium.launch({ executablePath: process.env.CHROMIUM || program, args: ["--no-sandbox"] });
const kinds = { ".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".json": "application/json", ".svg": "image/svg+xml", ".png": "image/png", ".gif": "image/gif" };
const failures = [];
let checks = 0;
function check(fine, what) { checks++; if (!fine) failures.push(what); }

async function open(path, width = 1280, colorScheme = "light") {
  const context = await browser.newContext({ offline: true, viewport: { width, height: 900 }, colorScheme });
  await context.route("**/*", route => {
    const url = new URL(route.request().url());
    let file = join(site, decodeURIComponent(url.pathname));
    if (url.host !== "docs.test") { failures.push(`${path} asked for ${url}`); return route.abort(); }
    if (existsSync(file) && statSync(file).isDirectory()) file = join(file, "index.html");
    if (!existsSync(file)) { failures.push(`${path} asked for ${url.pathname}, which is not there`); return route.abort(); }
    return route.fulfill({ body: readFileSync(file), contentType: kinds[extname(file)] || "application/octet-stream" });
  });
  const page = await context.newPage();
  page.on("pageerror", error => failures.push(`${path}: ${error.message}`));
  page.on("console", message => { if (message.type() === "error") failures.push(`${path}: ${message.text()}`); });
  await page.goto("http://docs.test/" + path, { waitUntil: "load" });
  return page;
}
async function shot(page, name) { await page.screenshot({ path: join(folder, `site-${name}.png`) }); await page.context().close(); }
const count = (page, what) => page.locator(what).count();

{ // styled, highlighted, with its navigation; the search finds
  const page = await open("text/");
  const colours = await page.evaluate(() => new Set([...document.querySelectorAll("pre code span")].map(span => getComputedStyle(span).color)).size);
  check(colours >= 3, `text: code is in ${colours} colours`);
  check(await page.evaluate(() => getComputedStyle(document.querySelector(".md-header")).position) === "sticky", "text: no styles");
  check(await count(page, ".md-nav--primary a") > 25, "text: the navigation is short");
  await page.locator("input.md-search__input").fill("localleap");
  await page.waitForSelector(".md-search-result__item", { timeout: 10000 }).catch(() => {});
  check(await count(page, ".md-search-result__item") > 0, "the search finds nothing");
  await page.keyboard.press("Escape");
  await page.waitForTimeout(500);
  await shot(page, "text");
}
{ // docstrings: settings as tables, no raw markup left
  const page = await open("api/samplers/");
  check(await count(page, "h3.doc-heading") > 40, "reference: samplers are missing");
  const text = await page.locator("article").innerText();
  check(!/^:::|Args:$/m.test(text), "reference: raw markup is left");
  await page.locator("h3", { hasText: "LocalLeap" }).scrollIntoViewIfNeeded();
  await shot(page, "reference");
}
{ // a notebook's pictures
  const page = await open("notebooks/pictures/");
  const wide = await page.evaluate(() => [...document.querySelectorAll("article img")].map(image => image.naturalWidth));
  check(wide.length >= 3 && wide.every(width => width > 100), `notebook: pictures are ${wide}`);
  await shot(page, "notebook");
}
{ // a telephone, in the dark
  const page = await open("samplers/", 375, "dark");
  check(await page.evaluate(() => document.documentElement.scrollWidth) <= 375, "wider than a telephone");
  const back = await page.evaluate(() => getComputedStyle(document.body).backgroundColor);
  check(back.match(/\d+/g).slice(0, 3).reduce((a, b) => a + Number(b), 0) < 200, `dark mode is ${back}`);
  await shot(page, "small");
}
{ // the button goes from the system's colours to light, to dark and back; figures follow
  const page = await open("architecture/", 1280, "dark");
  const scheme = () => page.evaluate(() => document.body.getAttribute("data-md-color-scheme"));
  const figure = async () => { await page.waitForTimeout(300); return (await page.locator("article img[src$=svg]").first().screenshot()).toString("base64"); };
  const system = [await scheme(), await figure()], press = () => page.locator(".md-header label[for^=__palette]:visible").click();
  await press();
  const light = [await scheme(), await figure()];
  await press();
  const dark = [await scheme(), await figure()];
  await press();
  check(system[0] === "slate" && light[0] === "default" && dark[0] === "slate" && await scheme() === "slate", `the toggle goes ${system[0]}, ${light[0]}, ${dark[0]}`);
  check(system[1] === dark[1] && dark[1] !== light[1], "figures do not follow the toggle");
  await page.context().close();
}
{ // every page: code fits its box, names in tables of guides are in one piece, nothing is wider than a telephone
  const pages = readdirSync(site, { recursive: true }).map(String).filter(file => file.endsWith("index.html")).map(file => file.slice(0, -"index.html".length));
  check(pages.length > 25, `only ${pages.length} pages`);
  for (const path of pages) {
    const page = await open(path);
    const wide = await page.evaluate(() => [...document.querySelectorAll("article pre > code")].filter(code => code.scrollWidth > code.clientWidth + 1).map(code => code.innerText.split("\n").sort((a, b) => b.length - a.length)[0]));
    check(!wide.length, `${path}: ${wide.length} blocks of code are wider than the page, such as ${wide[0]}`);
    const broken = await page.evaluate(() => [...document.querySelectorAll("article table:not(.highlighttable) code")].filter(code => !code.closest(".doc-contents") && !/[^\w.]/.test(code.innerText) && code.getClientRects().length > 1).map(code => code.innerText));
    check(!broken.length, `${path}: broken in a table: ${broken[0]}`);
    await page.setViewportSize({ width: 375, height: 800 });
    check(await page.evaluate(() => document.documentElement.scrollWidth) <= 375, `${path}: wider than a telephone`);
    await page.context().close();
  }
}
for (const path of ["", "samplers/", "architecture/"]) for (const width of [1280, 375]) for (const colours of ["light", "dark"])
  await shot(await open(path, width, colours), `${path.replace("/", "") || "home"}-${width}-${colours}`);
await browser.close();
console.log(failures.map(failure => "FAIL " + failure).join("\n") + (failures.length ? "\n" : "") + `${checks - failures.length} of ${checks} checks of the site passed`);
process.exit(failures.length ? 1 : 0);
