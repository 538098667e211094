// Applies the events of a page's stream. The page is complete without this script.
'use strict';

(() => {
  const { events, since: loaded } = document.body.dataset;
  const status = document.getElementById('status');
  if (!events || !status || !window.EventSource) return;

  let since = loaded;
  let source = null;
  let timer = 0;

  const say = (word, text) => {
    document.body.dataset.state = word;
    status.textContent = text;
  };

  // What a person does with a part stays when the part is replaced: open tables, how far they are scrolled, and the focus.
  const focusable = 'a, summary, button, [tabindex]';
  const all = (root, selector) => [...root.querySelectorAll(selector)];
  const replace = (old, fresh) => {
    const focused = all(old, focusable).indexOf(document.activeElement);
    const scrolled = all(old, '.wide').map((element) => element.scrollLeft);
    all(old, 'details').forEach((element, at) => {
      const same = all(fresh, 'details')[at];
      if (same) same.open = element.open;
    });
    old.replaceWith(fresh);
    all(fresh, '.wide').forEach((element, at) => { element.scrollLeft = scrolled[at] || 0; });
    if (focused >= 0) all(fresh, focusable)[focused]?.focus({ preventScroll: true });
  };

  const apply = (event) => {
    if (event.lastEventId) since = event.lastEventId;
    const template = document.createElement('template');
    template.innerHTML = event.data;
    for (const fresh of [...template.content.children]) {
      const old = fresh.id && document.getElementById(fresh.id);
      if (old) replace(old, fresh);
    }
  };

  const later = () => {
    say('off', 'No live updates. The page is loaded again every 30 seconds.');
    timer = setTimeout(() => location.reload(), 30000);
  };

  const close = () => {
    clearTimeout(timer);
    source?.close();
    source = null;
  };

  const open = () => {
    close();
    source = new EventSource(`${events}&since=${encodeURIComponent(since)}`);
    source.onopen = () => say('live', 'Live');
    source.onerror = () => {
      if (source?.readyState === EventSource.CLOSED) later();
      else say('off', 'Connection lost. Trying again.');
    };
    for (const name of ['node', 'totals', 'waiting']) source.addEventListener(name, apply);
    source.addEventListener('reload', () => { close(); location.reload(); });
  };

  // A page that is not visible needs no stream: the server has few.
  document.addEventListener('visibilitychange', () => (document.hidden ? close() : open()));
  window.addEventListener('pagehide', close);
  window.addEventListener('pageshow', (event) => { if (event.persisted) open(); });
  if (!document.hidden) open();
})();
