//! Draws a state.

use divvy_host::plain_line;
use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::style::{Color, Modifier};

use crate::bar::bar;
use crate::row::{Of, TopRow, time};
use crate::rows::rows;
use crate::seen::Screen;
use crate::state::TopState;
use crate::waiting::{explained, listed, wrapped};
use divvy_view::WaitingPod;
use divvy_view::amounts::{Amounts, memory};

/// How the terminal shows text.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ScreenStyle {
    /// Use ASCII only.
    pub ascii: bool,
    /// Use colors.
    pub color: bool,
}

/// The widths of the columns on a terminal of 80 columns: name, bar, allocated, used, and busy. What is left is for the text.
const WIDTHS: [usize; 5] = [20, 14, 12, 9, 4];
const HEADERS: [&str; 6] = ["NAME", "MEMORY", "ALLOC", "USED", "BUSY", "STATE"];
/// The widths of the first columns of the screen of waiting pods.
const WAITING: [usize; 2] = [28, 6];
const KEYS: [(&str, &str); 11] = [
    ("Enter", "show the node or the pod of the row"),
    ("Esc", "back; remove the filter"),
    ("/", "show only rows with a text in their name"),
    ("s", "sort by name, alloc, used, busy, waste (alloc, not used), or age"),
    ("p", "all pods"),
    ("w", "the pods that wait for GPUs, and why"),
    ("t", "the cluster as a tree of nodes, GPUs, and pods"),
    ("arrows j k", "move"),
    ("g G", "first and last row"),
    ("?", "this help"),
    ("q", "leave"),
];
const LEGEND: [(char, char, &str); 5] = [
    ('█', '#', "used"),
    ('▒', '=', "allocated and not used"),
    ('▚', ':', "held by containers of deleted pods"),
    ('░', '.', "free"),
    ('!', '!', "used beyond a pod's share, or without a share"),
];

/// Draw a state. What does not fit is cut off on the right and at the bottom.
pub fn draw(state: &TopState, style: ScreenStyle, area: Rect, buffer: &mut Buffer) {
    if area.is_empty() {
        return;
    }
    let mut page = ScreenArea { style, area, buffer };
    page.line(0, &title(state), Modifier::BOLD);
    if state.help {
        page.help();
        return;
    }
    let widths = widths(usize::from(area.width));
    match state.seen.screen() {
        Screen::Waiting => page.waiting(1, ["NAME", "WAITS", "WHY"], Modifier::UNDERLINED),
        Screen::Why(_) => {}
        _ => page.cells(1, &widths, HEADERS.map(str::to_owned), None, Modifier::UNDERLINED),
    }
    let rows = rows(&state.seen);
    let bottom = area.height.saturating_sub(1);
    let height = state.height();
    for (line, (at, row)) in (2_u16..bottom).zip(rows.iter().enumerate().skip(state.above).take(height)) {
        page.row(line, &widths, row, at == state.cursor);
    }
    if rows.is_empty() {
        let lines = wrapped("", "", empty(state), area.width);
        for (line, text) in (2_u16..bottom).zip(lines) {
            page.line(line, &text, Modifier::empty());
        }
    }
    if let Some(Of::Waiting(key)) = rows.get(state.cursor).map(|row| &row.of) {
        let above = bottom.saturating_sub(u16::try_from(state.panel()).unwrap_or(0) + u16::from(state.notice().is_some()));
        page.panel(above, state.panel(), state.seen.waiting_pod(key));
    }
    if let Some(notice) = state.notice().filter(|_| bottom > 1) {
        page.line(bottom - 1, notice, Modifier::BOLD);
    }
    if bottom > 0 {
        page.line(bottom, &keys(state), Modifier::DIM);
    }
}

/// Return the header and all rows as text, for output that takes no keys. If the waiting pods were read, they follow.
pub fn lines(state: &TopState, style: ScreenStyle, columns: u16) -> Vec<String> {
    let area = Rect::new(0, 0, columns, 1);
    let widths = widths(usize::from(columns));
    let line = |draw: &dyn Fn(&mut ScreenArea)| {
        let mut buffer = Buffer::empty(area);
        let mut page = ScreenArea {
            style,
            area,
            buffer: &mut buffer,
        };
        draw(&mut page);
        let cells = (0..columns).map(|x| buffer[(x, 0)].symbol());
        cells.collect::<String>().trim_end().to_owned()
    };
    let header = line(&|page| page.cells(0, &widths, HEADERS.map(str::to_owned), None, Modifier::empty()));
    let rows = rows(&state.seen);
    let rows = rows.iter().map(|row| line(&|page| page.row(0, &widths, row, false)));
    let waiting = state.seen.waiting.as_deref().unwrap_or_default();
    let title = (!waiting.is_empty()).then(|| [String::new(), "WAITING PODS".to_owned()]);
    let waiting = waiting.iter().flat_map(|pod| listed(pod, columns));
    let waiting = waiting.map(|text| line(&|page| page.line(0, &text, Modifier::empty())));
    let waiting = title.into_iter().flatten().chain(waiting);
    [header].into_iter().chain(rows).chain(waiting).collect()
}

fn title(state: &TopState) -> String {
    let about = match state.seen.screen() {
        Screen::Cluster => "cluster".to_owned(),
        Screen::Pods => "pods".to_owned(),
        Screen::Node(name) => format!("node {name}"),
        Screen::Pod(uid) => {
            let pods = state
                .seen
                .view
                .iter()
                .flat_map(|view| &view.nodes)
                .flat_map(|node| &node.gpus);
            let mut pods = pods.flat_map(|gpu| &gpu.pods).filter(|pod| pod.uid == *uid);
            pods.next()
                .map_or_else(|| "pod".to_owned(), |pod| format!("pod {}", pod.full_name()))
        }
        Screen::Waiting => match state.seen.waiting.as_ref().map(Vec::len) {
            None => "waiting pods".to_owned(),
            Some(1) => "1 pod waits for GPUs".to_owned(),
            Some(pods) => format!("{pods} pods wait for GPUs"),
        },
        Screen::Why(key) => match state.seen.waiting_pod(key).and_then(|pod| pod.seconds) {
            Some(seconds) => format!("pod {key} has waited for {}", time(seconds)),
            None => format!("pod {key} waits"),
        },
    };
    let mut title = format!("divvy top  {about}");
    if let (Screen::Cluster, Some(view)) = (state.seen.screen(), &state.seen.view) {
        title = format!("{title}  {}/{} {} allocated", view.allocated, view.total, view.unit);
    }
    if !state.wants_waiting() {
        title = format!("{title}  sort: {}", state.seen.sort.word());
    }
    if !state.seen.filter.is_empty() && !state.typing {
        title = format!("{title}  filter: {}", state.seen.filter);
    }
    title
}

fn empty(state: &TopState) -> &str {
    match &state.seen.view {
        Some(_) if state.wants_waiting() && state.seen.filter.is_empty() => match (&state.seen.waiting, &state.unknown) {
            (None, _) => "The waiting pods are being read.",
            (Some(_), Some(unknown)) => unknown,
            (Some(_), None) => "No pod waits for GPUs.",
        },
        None => "The cluster is being read.",
        Some(_) if !state.seen.filter.is_empty() => "No name has this text. Esc removes the filter.",
        Some(view) if view.nodes.is_empty() => "No node offers GPUs through Divvy.",
        Some(_) => "No pod has a GPU.",
    }
}

fn keys(state: &TopState) -> String {
    if state.typing {
        format!("/{}", state.seen.filter)
    } else {
        "Enter open  Esc back  / filter  s sort  p pods  w wait  t tree  ? help  q quit".to_owned()
    }
}

/// Return the columns that fit, at least the first one. On a wide terminal, the name and the bar are wider.
fn widths(columns: usize) -> Vec<usize> {
    let more = columns.saturating_sub(80);
    let mut widths = WIDTHS;
    widths[0] += (more / 2).min(24);
    widths[1] += (more / 4).min(10);
    let mut fitting = Vec::new();
    let mut left = columns;
    for width in widths {
        // A column that does not fit is left out: half a number would be a wrong one.
        if width > left && !fitting.is_empty() {
            return fitting;
        }
        fitting.push(width.min(left));
        left = left.saturating_sub(width + 1);
    }
    if left > 0 {
        fitting.push(left);
    }
    fitting
}

/// Format a part of an amount: `3/16 GiB`.
fn part(allocated: u64, total: u64) -> String {
    let is_whole = |bytes: u64| bytes.is_multiple_of(1 << 30);
    match (is_whole(allocated) && is_whole(total), total >= 10 << 40) {
        (_, true) => format!("{}/{} TiB", allocated >> 40, total >> 40),
        (true, _) => format!("{}/{} GiB", allocated >> 30, total >> 30),
        (false, _) => {
            let tenth = |bytes: u64| format!("{}.{}", bytes >> 30, u128::from(bytes % (1 << 30)) * 10 / (1 << 30));
            format!("{}/{} G", tenth(allocated), tenth(total))
        }
    }
}

/// The colors of nvitop: up to 10 percent, up to `most` percent, and above.
fn level(percent: u64, most: u64) -> Color {
    match percent {
        0..10 => Color::Green,
        _ if percent < most => Color::Yellow,
        _ => Color::Red,
    }
}

struct ScreenArea<'b> {
    style: ScreenStyle,
    area: Rect,
    buffer: &'b mut Buffer,
}

impl ScreenArea<'_> {
    /// Write text in one line, at most `width` columns.
    fn put(&mut self, column: usize, line: u16, text: &str, width: usize, style: ratatui::style::Style) {
        let (Ok(column), true) = (u16::try_from(column), line < self.area.height) else {
            return;
        };
        if column >= self.area.width {
            return;
        }
        let width = width.min(usize::from(self.area.width - column));
        let text = plain_line(text.chars());
        let text = if self.style.ascii {
            text.chars().map(ascii).collect()
        } else {
            text
        };
        let (x, y) = (self.area.x + column, self.area.y + line);
        self.buffer
            .set_stringn(x, y, fitted(&text, width, self.style.ascii), width, style);
    }

    fn line(&mut self, line: u16, text: &str, modifier: Modifier) {
        let style = ratatui::style::Style::new().add_modifier(modifier);
        self.put(0, line, text, usize::from(self.area.width), style);
    }

    /// Write the cells of a row: numbers to the right, the rest to the left.
    fn cells(&mut self, line: u16, widths: &[usize], cells: [String; 6], colors: Option<[Option<Color>; 6]>, modifier: Modifier) {
        let mut column = 0;
        for (at, (width, cell)) in widths.iter().zip(cells).enumerate() {
            let mut style = ratatui::style::Style::new().add_modifier(modifier);
            if let Some(color) = colors.and_then(|colors| colors[at]).filter(|_| self.style.color) {
                style = style.fg(color);
            }
            let text = match at {
                2..5 => format!("{cell:>width$}"),
                _ => format!("{cell:<width$}"),
            };
            self.put(column, line, &text, *width, style);
            column += width + 1;
        }
    }

    /// Write the cells of a waiting pod, as wide as fits.
    fn waiting(&mut self, line: u16, cells: [&str; 3], modifier: Modifier) {
        let columns = usize::from(self.area.width);
        let name = WAITING[0] + (columns.saturating_sub(80) / 2).min(24);
        let style = ratatui::style::Style::new().add_modifier(modifier);
        let widths = [name, WAITING[1], columns.saturating_sub(name + WAITING[1] + 2)];
        let mut column = 0;
        for (at, (width, cell)) in widths.into_iter().zip(cells).enumerate() {
            let text = match at {
                1 => format!("{cell:>width$}"),
                _ => format!("{cell:<width$}"),
            };
            self.put(column, line, &text, width, style);
            column += width + 1;
        }
    }

    /// Explain a waiting pod in `height` lines: the sentence, and the best suggestion.
    fn panel(&mut self, line: u16, height: usize, pod: Option<&WaitingPod>) {
        let Some(pod) = pod.filter(|_| height > 1) else { return };
        self.line(line, &"─".repeat(usize::from(self.area.width)), Modifier::DIM);
        let lines = explained(pod, self.area.width, 1);
        let more = lines.len() > height - 1;
        for (at, text) in (0..height - 1).zip(lines) {
            let text = if more && at == height - 2 {
                format!("{text} …")
            } else {
                text
            };
            self.line(line + 1 + u16::try_from(at).unwrap_or(u16::MAX), &text, Modifier::empty());
        }
    }

    fn row(&mut self, line: u16, widths: &[usize], row: &TopRow, is_selected: bool) {
        let modifier = if is_selected { Modifier::REVERSED } else { Modifier::empty() };
        match row.of {
            Of::Waiting(_) => {
                let age = row.age.map_or_else(|| "–".to_owned(), time);
                return self.waiting(line, [&row.name, &age, &row.text], modifier);
            }
            Of::Line(_) => {
                let columns = usize::from(self.area.width);
                return self.line(line, &format!("{:<columns$}", row.name), modifier);
            }
            _ => {}
        }
        let unknown = || "–".to_owned();
        let name = format!("{}{}", "  ".repeat(row.indent), row.name);
        let bar_width = widths.get(1).copied().unwrap_or(0);
        let amounts = row.amounts;
        let cells = [
            name,
            amounts.map_or_else(String::new, |of| bar(&of, bar_width, self.style.ascii)),
            amounts.map_or_else(unknown, |of| part(of.allocated, of.total)),
            amounts.and_then(|of| of.used).map_or_else(unknown, memory),
            amounts.and_then(|of| of.busy).map_or_else(unknown, |busy| format!("{busy}%")),
            row.text.clone(),
        ];
        let used = amounts.and_then(|of| Some((of, of.used?)));
        let used = used.map(|(of, used)| level(percent(used, &of), 80));
        let busy = amounts.and_then(|of| of.busy).map(|busy| level(u64::from(busy), 75));
        let text = row.alarm.then_some(Color::Red);
        self.cells(line, widths, cells, Some([None, used, None, used, busy, text]), modifier);
    }

    fn help(&mut self) {
        let keys = KEYS.map(|(key, text)| format!("  {key:<12}{text}"));
        let legend = LEGEND.map(|(sign, ascii, text)| format!("  {:<12}{text}", if self.style.ascii { ascii } else { sign }));
        let lines = keys.into_iter().chain([String::new()]).chain(legend);
        for (line, text) in (2_u16..).zip(lines) {
            self.line(line, &text, Modifier::empty());
        }
    }
}

fn percent(used: u64, of: &Amounts) -> u64 {
    u128::from(used)
        .saturating_mul(100)
        .checked_div(u128::from(of.total))
        .map_or(0, |percent| u64::try_from(percent).unwrap_or(u64::MAX))
}

/// Return what stands for a character where only ASCII is shown.
fn ascii(character: char) -> char {
    match character {
        '–' | '─' => '-',
        '…' => '~',
        '°' => ' ',
        of if of.is_ascii() => of,
        _ => '?',
    }
}

/// Return the text, or its beginning and a sign if it is too long.
fn fitted(text: &str, width: usize, ascii: bool) -> String {
    if text.trim_end().chars().count() > width {
        let begin = text.chars().take(width.saturating_sub(1));
        begin.chain([if ascii { '~' } else { '…' }]).collect()
    } else {
        text.to_owned()
    }
}
