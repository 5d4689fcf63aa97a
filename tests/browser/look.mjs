// Opens the pages that write_pages.py wrote in Chromium, with the network off, moves the slider and the keys, and
// compares what is seen with what was recorded. Screenshots go beside the pages.
//     node tests/browser/look.mjs FOLDER          (playwright-core is found from the folder's node_modules, or above)
import { createRequire } from "node:module";
import { existsSync, readdirSync, readFileSync } from "node:fs";
import { join, resolve } from "node:path";

const folder = resolve(process.argv[2]);
const { chromium } = createRequire(join(folder, "x.js"))("playwright-core");
const program = ["/usr/bin/chromium", "/usr/bin/chromium-browser", "/usr/bin/google-chrome"].find(path => existsSync(path));
const browser = await chromium.launch({ executablePath: process.env.CHROMIUM || program, args: ["--no-sandbox"] });
let checks = 0;
const failures = [];
function check(fine, what) { checks++; if (!fine) failures.push(what); }

async function open(name, width = 1100, colorScheme = "light") {
  const context = await browser.newContext({ offline: true, viewport: { width, height: 900 }, colorScheme });
  const page = await context.newPage();
  page.on("pageerror", error => failures.push(`${name}: ${error.message}`));
  page.on("console", message => { if (message.type() === "error") failures.push(`${name}: ${message.text()}`); });
  page.on("request", request => { if (!/^(file|data|about|blob):/.test(request.url())) failures.push(`${name} asked for ${request.url()}`); });
  page.on("dialog", dialog => { failures.push(`${name} opened a dialog`); dialog.dismiss(); });
  await page.goto("file://" + join(folder, name + ".html"));
  return page;
}
const step = page => page.locator("#where").innerText().then(text => Number(text.match(/step (\d+)/)[1]));
const seen = (page, section) => page.evaluate(section => [...document.querySelectorAll("section")[section].querySelectorAll(".text")].map(text =>
  Object.fromEntries([...text.querySelectorAll("[data-i]")].map(cell => [cell.dataset.i, { text: cell.querySelector(".now").textContent, cls: cell.className, wide: cell.getBoundingClientRect().width }]))), section);

function squeezed(text) { return text.replace(/\s/g, ""); }

async function checkText(page, name, expected, section) {
  for (const [k, canvas] of Object.entries(expected.canvas)) {
    await page.locator("#slider").fill(k);
    check(await step(page) === Number(k), `${name}: the slider at ${k} shows step ${await step(page)}`);
    const rows = await seen(page, section);
    const back = new Set((expected.back[k] || []).map(place => place.join(" ")));
    rows.forEach((cells, r) => {
      for (const i of expected.filled[r]) {
        const cell = cells[i], id = canvas[r][i];
        if (!cell) { check(id === expected.mask, `${name}: position ${i} of row ${r} is not drawn`); continue; }
        if (id === expected.mask) {
          check(/waiting/.test(cell.cls) || Number(k) === expected.steps, `${name}, step ${k}: position ${i} of row ${r} is undecided, and drawn as ${cell.cls} ${cell.text}`);
          check(!back.has(r + " " + i) || /taken/.test(cell.cls), `${name}, step ${k}: position ${i} was taken back`);
        } else {
          const text = expected.texts[id], plain = /^[a-zA-Z0-9]+$/.test(text || "");
          check(!/waiting/.test(cell.cls), `${name}, step ${k}: position ${i} of row ${r} is decided`);
          if (plain && !/\bpad\b/.test(cell.cls)) check(squeezed(cell.text) === squeezed(text), `${name}, step ${k}: position ${i} shows ${cell.text}, not ${text}`);
        }
      }
    });
  }
}

const names = readdirSync(folder).filter(file => file.endsWith(".expected.json")).map(file => file.replace(".expected.json", "")).sort();
for (const name of names) {
  const expected = JSON.parse(readFileSync(join(folder, name + ".expected.json"), "utf-8"));
  const page = await open(name), last = Math.max(...expected.map(run => run.steps));
  check(await step(page) === last, `${name}: opens at its end`);
  for (const [index, run] of expected.entries()) {
    const stats = await page.locator(".stats").nth(index).innerText(), keys = await page.locator(".keys").nth(2 * index).innerText();
    check(stats.startsWith(run.forwards.toLocaleString("en") + " forward"), `${name}: says ${stats}`);
    check(run.kinds.every(kind => keys.includes(kind)), `${name}: keys are ${keys}`);
    if (run.canvas) await checkText(page, name, run, index);
    if (run.grid) check(await page.locator(".pictures canvas").count() === run.rows, `${name}: a canvas for every picture`);
  }
  // keys and buttons
  await page.keyboard.press("Home");
  check(await step(page) === 0, `${name}: Home`);
  await page.keyboard.press("ArrowRight"); await page.keyboard.press("ArrowRight"); await page.keyboard.press("ArrowLeft");
  check(await step(page) === Math.min(1, last), `${name}: arrow keys`);
  await page.locator("#forth").click(); await page.locator("#back").click();
  check(await step(page) === Math.min(1, last), `${name}: buttons`);
  await page.locator("#title").click(); await page.locator("#speed").selectOption("4");
  await page.evaluate(() => document.activeElement.blur());
  await page.keyboard.press("Home"); await page.keyboard.press(" ");
  await page.waitForFunction(() => document.getElementById("slider").value > 0, null, { timeout: 5000 }).catch(() => {});
  await page.keyboard.press(" ");
  const played = await step(page);
  check(played > 0, `${name}: space plays`);
  await page.waitForTimeout(350);
  check(await step(page) === played, `${name}: space pauses`);
  const box = await page.locator(".chart").first().boundingBox();
  await page.mouse.click(box.x + box.width / 2, box.y + 10);
  check(Math.abs(await step(page) - expected[0].steps / 2) <= 1, `${name}: a click on the costs goes there`);
  if (await page.locator("#colour").isVisible()) for (const mode of ["score", "rule", "none", "step"]) await page.locator("#colour").selectOption(mode);
  await page.locator("#slider").fill(String(Math.ceil(last / 2)));
  await page.screenshot({ path: join(folder, name + ".png") });
  check(await page.evaluate(() => window.hacked === undefined), `${name}: a token ran as a script`);
  check(await page.evaluate(() => document.querySelectorAll("main img:not(figure img), main script").length) === 0, `${name}: a token became a tag`);
  await page.context().close();
  const small = await open(name, 375, "dark");
  await small.locator("#slider").fill(String(Math.ceil(last / 2)));
  check(await small.evaluate(() => document.documentElement.scrollWidth) <= 375, `${name}: wider than a telephone`);
  const [back, front] = await small.evaluate(() => { const style = getComputedStyle(document.body); return [style.backgroundColor, style.color]; });
  const bright = colour => colour.match(/\d+/g).slice(0, 3).reduce((a, b) => a + Number(b), 0);
  check(bright(back) < 150 && bright(front) > 600, `${name}: dark mode is ${front} on ${back}`);
  await small.screenshot({ path: join(folder, name + "-small.png") });
  await small.context().close();
}

{ // the picture under the grid comes to light with its tokens
  const page = await open("recap"), grey = () => page.evaluate(() => {
    const canvas = document.querySelector(".pictures canvas"), data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
    let count = 0;
    for (let i = 0; i < data.length; i += 4) count += data[i] === 217 && data[i + 1] === 217 && data[i + 2] === 226;
    return count / (data.length / 4);
  });
  await page.locator("#seen").uncheck();
  const shares = [];
  for (const k of [0, 3, 5, 8]) { await page.locator("#slider").fill(String(k)); shares.push(await grey()); }
  check(shares[0] === 1 && shares[3] < 0.02 && shares[0] > shares[1] && shares[1] > shares[2] && shares[2] > shares[3], `recap: undecided shares ${shares}`);
}
{ // latents change from step to step; a pipeline's picture is there at the end
  const page = await open("forecast"), sources = [];
  for (const k of ["1", "15", "30"]) { await page.locator("#slider").fill(k); sources.push(await page.locator("figure img").first().getAttribute("src")); }
  check(new Set(sources).size === 3 && sources.every(source => source.startsWith("data:image/png")), "forecast: the latent of every step");
  const made = await open("pipeline");
  check(await made.locator("figure img").first().evaluate(image => image.naturalWidth) === 28, "pipeline: its picture");
}
{ // playing ends at the end
  const page = await open("both");
  await page.locator("#speed").selectOption("30"); await page.locator("#slider").fill("30");
  await page.locator("#play").click();
  await page.waitForFunction(() => document.getElementById("slider").value === "32", null, { timeout: 5000 });
  check(await page.locator("#play").getAttribute("aria-label") === "play", "both: playing goes on after the end");
}
{ // two runs in step: the shorter one stays at its end
  const page = await open("both");
  await page.locator("#slider").fill("20");
  const stats = await page.locator(".stats").allInnerTexts();
  check(stats[0].startsWith("20 forwards") && /^4 forwards, 7 of 7 tokens/.test(stats[1]), `both: ${stats}`);
}
{ // other scripts: right to left, one sign of two ids, nothing invisible
  const page = await open("scripts");
  check(await page.locator(".text").getAttribute("dir") === "rtl", "scripts: direction");
  const cells = (await seen(page, 0))[0], count = Object.keys(cells).length;
  check(cells[count - 2].text === "🦊" && cells[count - 1].text === "", `scripts: joined ${cells[count - 2].text}`);
  const [first, second] = await page.evaluate(() => [...document.querySelectorAll("[data-i]")].slice(0, 2).map(cell => cell.getBoundingClientRect().x));
  check(first > second, "scripts: the second word is left of the first");
  check(Object.values(cells).every(cell => cell.wide > 5), "scripts: a token without a width");
  await page.locator("#slider").fill("9");
  check(!(await page.locator(".text").innerText()).includes("🦊"), "scripts: half of a sign is no sign");
}
{ // in a notebook the page runs in a frame of its own
  const page = await open("notebook"), frame = page.frameLocator("iframe");
  await frame.locator("#slider").fill("2");
  check((await frame.locator("#where").innerText()).startsWith("step 2 of"), "notebook: the slider in the frame");
  check(await page.evaluate(() => { try { return document.querySelector("iframe").contentDocument === null; } catch { return true; } }), "notebook: the frame is apart");
  await page.screenshot({ path: join(folder, "notebook.png") });
}
{ // what is under the pointer is told
  const page = await open("union");
  await page.locator("#slider").fill("2");
  const cell = page.locator(".cell.fresh").first();
  await cell.hover();
  const told = await page.locator("#detail").innerText();
  check(/position \d+ · ".*" \(id \d+\) · step 2 · confidence [\d.]+ · (credit|localleap)/.test(told), `union: told ${told}`);
  check(await page.locator(".cell.seen").count() > 0 && await page.locator(".cell.open").count() > 0, "union: what was evaluated, and the block");
}
{ // rejected drafts are struck out
  const page = await open("freedave");
  let found = 0;
  const last = Number(await page.locator("#slider").getAttribute("max"));
  for (let k = 1; k <= last; k++) { await page.locator("#slider").fill(String(k)); found += await page.locator(".drafts").count(); }
  check(found > 0, "freedave: no rejected draft is shown");
}
await browser.close();
console.log(failures.map(failure => "FAIL " + failure).join("\n") + (failures.length ? "\n" : "") + `${checks - failures.length} of ${checks} checks passed, ${names.length} pages`);
process.exit(failures.length ? 1 : 0);
