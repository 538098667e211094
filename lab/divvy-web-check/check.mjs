// Checks the web pages in a browser: `node check.mjs PROGRAM CHROMIUM [DIRECTORY]`. PROGRAM is divvy-web-check, which serves a made-up cluster. Screenshots go to
// the directory, if one is named. `cargo xtask web-check` runs this.

import assert from 'node:assert/strict';
import { spawn } from 'node:child_process';
import { mkdirSync, readFileSync, statSync } from 'node:fs';
import { createRequire } from 'node:module';
import { createInterface } from 'node:readline';
import { chromium } from 'playwright-core';

const [program, executablePath, pictures] = process.argv.slice(2);
const axe = readFileSync(createRequire(import.meta.url).resolve('axe-core/axe.min.js'), 'utf8');
const PICTURE_BYTES = 150 * 1024;

// All pages, in both themes and both widths.
const PATHS = ['/', '/?health=problem', '/?namespace=nothing', '/nodes/gpu-a30-01', '/nodes/gpu-h100-02', '/nodes/gpu-l40s-01', '/pods/vision/legacy-tagger',
  '/pods/research/pretrain-0', '/waiting', '/login', '/nodes/none'];
const MISSING = new Set(['/nodes/none']);
const THEMES = ['light', 'dark'];
const WIDTHS = [1280, 360];
// What a page that runs a name as a script would call.
const TRAP = 'window.alert = (text) => { throw new Error(`a script ran: ${text}`); };';

class Server {
  constructor(...flags) {
    this.child = spawn(program, flags, { stdio: ['pipe', 'pipe', 'inherit'] });
    this.lines = createInterface({ input: this.child.stdout })[Symbol.asyncIterator]();
  }

  static async start(...flags) {
    const server = new Server(...flags);
    server.address = (await server.lines.next()).value;
    server.origin = new URL(server.address).origin;
    return server;
  }

  // Tell the program something, and wait until it is done.
  async tell(line) {
    this.child.stdin.write(`${line}\n`);
    assert.equal((await this.lines.next()).value, `done ${line}`);
  }

  stop() {
    this.child.stdin.end();
  }
}

const browser = await chromium.launch({ executablePath, args: ['--no-sandbox'] });
let failed = 0;

// Run a check with a page of its own, which is signed in.
const check = async (name, options, run) => {
  const { flags = [], signedIn = true, ...context } = options;
  const server = await Server.start(...flags);
  const own = await browser.newContext({ viewport: { width: 1280, height: 800 }, ...context });
  try {
    await own.addInitScript(TRAP);
    const page = await own.newPage();
    const said = [];
    page.on('console', (message) => said.push(`${page.url()}: ${message.text()}`));
    page.on('pageerror', (error) => said.push(`${page.url()}: ${error}`));
    if (signedIn) await page.goto(server.address);
    await run({ page, server, said, open: (path) => page.goto(server.origin + path) });
    // Chromium reports what these checks do (refused requests, closed connections), and advises a field for a user's name, which a token does not have. Nothing
    // else may be reported, above all no violation of the page's policy.
    const expected = /Failed to load resource: (the server responded with a status of (401|404|503)|net::)|Password forms should have/;
    const wrong = said.filter((line) => !expected.test(line));
    assert.deepEqual(wrong, [], 'the console has no reports');
    console.log(`ok    ${name}`);
  } catch (error) {
    failed += 1;
    console.log(`FAIL  ${name}\n${error.stack}`);
  } finally {
    await own.close();
    server.stop();
  }
};

const live = (page) => page.waitForFunction(() => document.body.dataset.state === 'live');
const text = (page, selector) => page.locator(selector).first().innerText();
const usedOf = (page, node) => page.locator(`[id="node-${node}"] svg.bar`).first().getAttribute('aria-label');

for (const colorScheme of THEMES) {
  for (const width of WIDTHS) {
    await check(`every page, ${colorScheme}, ${width} px: no violation of axe, no scroll bar, no report`, { colorScheme, viewport: { width, height: 800 } }, async ({ page, open }) => {
      for (const path of PATHS) {
        const response = await open(path);
        assert.equal(response.status(), MISSING.has(path) ? 404 : 200, path);
        await page.locator('details').evaluateAll((all) => all.forEach((details) => { details.open = true; }));
        const sizes = await page.evaluate(() => [document.documentElement.scrollWidth, window.innerWidth]);
        assert.ok(sizes[0] <= sizes[1], `${path} is ${sizes[0]} px wide in a window of ${sizes[1]} px`);
        // The page's own policy forbids scripts that are not its own; the debugger's are not subject to it.
        await page.evaluate(axe);
        const { violations, passes } = await page.evaluate(() => axe.run(document, { resultTypes: ['violations', 'passes'] }));
        const lines = violations.flatMap((of) => of.nodes.map((node) => `${of.id}: ${node.html.slice(0, 200)}: ${node.failureSummary}`));
        assert.deepEqual(lines, [], path);
        assert.ok(passes.length > 10, `${path}: axe checked something`);
      }
    });
  }
}

await check('without script, the same elements are there, and the page is loaded again every 30 seconds', { javaScriptEnabled: false }, async ({ page, open }) => {
  for (const path of PATHS.filter((path) => !MISSING.has(path) && path !== '/login')) {
    await open(path);
    assert.equal(await page.locator('meta[http-equiv=refresh][content="30"]').count(), 1, path);
    assert.ok(await page.locator('main').innerText(), path);
    assert.match(await text(page, '.state'), /As of \d{4}-\d\d-\d\d/);
  }
  await open('/');
  assert.equal(await page.locator('.card').count(), 12);
  await page.locator('.filter select[name=health]').selectOption('problem');
  await page.locator('.filter button').click();
  assert.deepEqual(await page.locator('.card h3').allInnerTexts(), ['gpu-a30-01', 'gpu-l40s-01']);
});

await check('a script in a name is text', {}, async ({ page, open }) => {
  for (const [path, selector] of [['/', '.notice'], ['/', '[id="node-gpu-l40s-01"] .models'], ['/nodes/gpu-l40s-01', '.models'], ['/waiting', '.card:last-of-type p']]) {
    await open(path);
    await live(page);
    assert.ok((await page.locator(selector).allInnerTexts()).join().includes('"><script>alert(1)</script><img src=x onerror=alert(2)>'), path);
    assert.equal(await page.locator('img').count(), 0);
    assert.equal(await page.locator('script').count(), 1);
  }
});

await check('an event replaces a card, and leaves tables open and the focus where it is', {}, async ({ page, server, open }) => {
  await open('/');
  await live(page);
  const before = await usedOf(page, 'gpu-a100-01');
  await page.locator('[id="node-gpu-a100-01"] summary').click();
  await page.locator('[id="node-gpu-a100-01"] h3 a').focus();
  const loaded = await page.evaluate(() => { window.kept = true; return performance.timeOrigin; });
  const started = Date.now();
  await server.tell('step');
  await page.waitForFunction(([label]) => document.querySelector('[id="node-gpu-a100-01"] svg.bar').getAttribute('aria-label') !== label, [before]);
  console.log(`      from the change to the page: ${Date.now() - started} ms`);
  assert.ok(Date.now() - started < 1000, 'the change is on the page within a second');
  assert.ok(await page.evaluate(() => window.kept && document.querySelector('[id="node-gpu-a100-01"] details').open));
  assert.equal(await page.evaluate(() => document.activeElement.textContent), 'gpu-a100-01');
  assert.equal(await page.evaluate(() => performance.timeOrigin), loaded, 'the page was not loaded again');
});

await check('a stream that was cut goes on, with what changed in the meantime', {}, async ({ page, server, open }) => {
  await open('/nodes/gpu-a100-01');
  await live(page);
  await server.tell('step');
  const before = await usedOf(page, 'gpu-a100-01');
  const again = page.waitForRequest((request) => request.url().includes('/events'));
  await server.tell('cut');
  await page.waitForFunction(() => document.body.dataset.state === 'off');
  assert.match(await text(page, '#status'), /Connection lost/);
  await server.tell('step');
  const headers = await (await again).allHeaders();
  assert.match(headers['last-event-id'] ?? '', /^[0-9a-f]{16}-\d+$/);
  await live(page);
  await page.waitForFunction(([label]) => document.querySelector('svg.bar').getAttribute('aria-label') !== label, [before]);
});

await check('a node that is gone is gone from the page', {}, async ({ page, server, open }) => {
  await open('/');
  await live(page);
  await server.tell('gone gpu-v100-01');
  await page.waitForFunction(() => document.querySelectorAll('.card').length === 11);
});

await check('a token that has expired leads to the form, and an API server that is away opens nothing', {}, async ({ page, server, open }) => {
  await open('/');
  await live(page);
  await server.tell('expire');
  await server.tell('cut');
  await page.waitForFunction(() => /No live updates/.test(document.getElementById('status').textContent));
  assert.equal((await open('/')).status(), 401);
  assert.equal(await page.locator('input[name=token]').count(), 1);
  assert.equal(await page.locator('.card').count(), 0);
  await server.tell('away');
  assert.equal((await open('/')).status(), 503);
  assert.equal(await page.locator('.card').count(), 0);
  await server.tell('valid');
  assert.equal((await open('/')).status(), 200);
});

await check('the form signs in, and the button signs out', { signedIn: false }, async ({ page, server, open }) => {
  assert.equal((await open('/waiting')).status(), 401);
  await page.locator('input[name=token]').fill('wrong');
  await page.locator('button').click();
  await page.waitForURL(`${server.origin}/login`);
  await page.locator('input[name=token]').fill(new URL(server.address).searchParams.get('token'));
  await page.locator('button').click();
  await page.waitForURL(`${server.origin}/`);
  const [cookie] = await page.context().cookies();
  assert.deepEqual([cookie.httpOnly, cookie.sameSite], [true, 'Strict']);
  assert.equal(await page.evaluate(() => document.cookie), '');
  await page.locator('footer button').click();
  await page.waitForURL(`${server.origin}/login`);
  assert.equal((await open('/')).status(), 401);
});

await check('the keyboard goes through the page in reading order', {}, async ({ page, open }) => {
  for (const path of ['/?model=NVIDIA+A30', '/nodes/gpu-a30-01', '/pods/vision/legacy-tagger', '/waiting']) {
    await open(path);
    const order = [];
    for (let at = 0; at < 80; at += 1) {
      await page.keyboard.press('Tab');
      const here = await page.evaluate(() => {
        const element = document.activeElement;
        if (!element || element === document.body) return null;
        const style = getComputedStyle(element);
        const all = [...document.querySelectorAll('*')];
        const box = element.getBoundingClientRect();
        return { at: all.indexOf(element), top: box.top + scrollY, name: element.textContent.trim().slice(0, 30) || element.name, outline: style.outlineStyle };
      });
      if (!here || (order.length && here.at <= order.at(-1).at)) break;
      order.push(here);
    }
    assert.ok(order.length > 4, path);
    assert.equal(order[0].name, 'Skip to the content');
    assert.equal(order.at(-1).name, 'Sign out', `${path}: ${JSON.stringify(order)}`);
    assert.ok(order.every((here) => here.outline !== 'none'), `${path}: the focus is visible`);
  }
  await open('/');
  await page.keyboard.press('Tab');
  await page.keyboard.press('Enter');
  assert.equal(await page.evaluate(() => document.activeElement.id), 'main');
});

if (pictures) {
  mkdirSync(pictures, { recursive: true });
  for (const [name, colorScheme, width, height] of [['web-light', 'light', 1200, 680], ['web-dark', 'dark', 1200, 680], ['web-narrow', 'light', 360, 720]]) {
    await check(`picture ${name}.png`, { flags: ['--plain'], colorScheme, viewport: { width, height } }, async ({ page, open }) => {
      await open('/');
      await live(page);
      const path = `${pictures}/${name}.png`;
      await page.screenshot({ path });
      const { size } = statSync(path);
      console.log(`      ${path}: ${Math.ceil(size / 1024)} KiB`);
      assert.ok(size <= PICTURE_BYTES, `${path} has ${size} bytes`);
    });
  }
}

await browser.close();
process.exitCode = failed ? 1 : 0;
