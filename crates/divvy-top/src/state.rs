//! What the screen depends on, and what an event changes.

use std::collections::BTreeSet;

use divvy_model::usage::Usage;
use divvy_view::{NoUsage, View, WaitingPod};

use crate::row::{Of, TopRow};
use crate::rows::rows;
use crate::seen::{ReceivedUsage, Screen, SeenCluster};

/// Something that happened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TopEvent {
    /// A key was pressed.
    Key(KeyPress),
    /// The terminal has this many columns and rows.
    Size(u16, u16),
    /// The cluster was read.
    Cluster {
        /// When, in seconds since 1970.
        at: u64,
        /// What was read.
        view: View,
    },
    /// The pods that wait for GPUs were read, the one that has waited longest first. The text says what is not known of them, and why.
    Waiting(Vec<WaitingPod>, Option<String>),
    /// A node's agent was asked what is used, at a time in seconds since 1970.
    Usage {
        /// The node's name.
        node: String,
        /// When it answered.
        at: u64,
        /// What it answered.
        answer: Result<Usage, NoUsage>,
    },
    /// Nothing is known of what is used, for this reason: a right is missing.
    Refused(String),
    /// The cluster cannot be read, or can be read again.
    Trouble(Option<String>),
}

/// A key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeyPress {
    /// A character.
    Char(char),
    /// Return.
    Enter,
    /// Escape.
    Esc,
    /// The key that deletes the character before the cursor.
    Backspace,
    /// One row up.
    Up,
    /// One row down.
    Down,
    /// One screen up.
    PageUp,
    /// One screen down.
    PageDown,
    /// To the first row.
    Home,
    /// To the last row.
    End,
    /// Ctrl-C.
    Interrupt,
}

/// The largest number of lines that explain the selected row.
const PANEL: usize = 7;

/// All that the screen depends on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TopState {
    pub(crate) seen: SeenCluster,
    /// The rows that the cursor was on when the screens before the current one were left.
    left: Vec<usize>,
    pub(crate) cursor: usize,
    /// The number of rows above the first one that is shown.
    pub(crate) above: usize,
    pub(crate) typing: bool,
    pub(crate) help: bool,
    refused: Option<String>,
    trouble: Option<String>,
    /// What is not known of the waiting pods.
    pub(crate) unknown: Option<String>,
    size: (u16, u16),
    done: bool,
}

impl Default for TopState {
    fn default() -> TopState {
        TopState {
            seen: SeenCluster::default(),
            left: Vec::new(),
            cursor: 0,
            above: 0,
            typing: false,
            help: false,
            refused: None,
            trouble: None,
            unknown: None,
            size: (80, 24),
            done: false,
        }
    }
}

impl TopState {
    /// Return the state after an event.
    #[must_use]
    pub fn update(mut self, event: TopEvent) -> TopState {
        let selected = self.selected();
        let is_key = matches!(event, TopEvent::Key(_));
        match event {
            TopEvent::Key(key) => self.press(key, selected.as_ref()),
            TopEvent::Size(columns, rows) => {
                self.size = (columns, rows);
                self.seen.columns = columns;
            }
            TopEvent::Cluster { at, view } => self.read(at, view),
            TopEvent::Waiting(pods, unknown) => {
                self.seen.waiting = Some(pods);
                self.unknown = unknown;
                self.leave_what_has_gone();
            }
            TopEvent::Usage { node, at, answer } => {
                // The node may have gone while its agent was asked.
                if self.seen.has(&node) {
                    self.seen.answers.insert(node, ReceivedUsage { at, usage: answer });
                }
            }
            TopEvent::Refused(text) => self.refused = Some(text),
            TopEvent::Trouble(text) => self.trouble = text,
        }
        self.settle(selected.as_ref().filter(|_| !is_key));
        self
    }

    /// Report whether the user wants to leave.
    pub fn is_done(&self) -> bool {
        self.done
    }

    /// Return the nodes whose usage the screen shows.
    pub fn wanted(&self) -> BTreeSet<String> {
        let shown = rows(&self.seen).into_iter().skip(self.above).take(self.height());
        shown.map(|row| row.node).filter(|node| !node.is_empty()).collect()
    }

    /// Report whether the screen shows pods that wait.
    pub fn wants_waiting(&self) -> bool {
        matches!(self.seen.screen(), Screen::Waiting | Screen::Why(_))
    }

    /// Return what the user should know.
    pub(crate) fn notice(&self) -> Option<&str> {
        // Where nothing else is to be shown, it is shown in the place of the rows.
        let has_rows = self.seen.waiting.as_ref().is_some_and(|pods| !pods.is_empty());
        let unknown = self.unknown.as_deref().filter(|_| self.wants_waiting() && has_rows);
        let refused = self.refused.as_deref().filter(|_| !self.wants_waiting());
        self.trouble.as_deref().or(unknown).or(refused)
    }

    /// Return how many rows fit on the screen: all lines except the title, the header, the notice, and the line with the keys.
    pub(crate) fn height(&self) -> usize {
        let others = 3 + usize::from(self.notice().is_some()) + self.panel();
        usize::from(self.size.1).saturating_sub(others)
    }

    /// Return how many lines below the rows explain the selected row.
    pub(crate) fn panel(&self) -> usize {
        match self.seen.screen() {
            Screen::Waiting => (usize::from(self.size.1) / 3).min(PANEL),
            _ => 0,
        }
    }

    fn read(&mut self, at: u64, view: View) {
        self.seen.view = Some(view);
        self.seen.at = at;
        let mut answers = std::mem::take(&mut self.seen.answers);
        answers.retain(|node, _| self.seen.has(node));
        self.seen.answers = answers;
        self.leave_what_has_gone();
    }

    /// Leave the screen of a node or a pod that has gone.
    fn leave_what_has_gone(&mut self) {
        while self.seen.screens.len() > 1
            && self.seen.filter.is_empty()
            && rows(&self.seen).is_empty()
            && !matches!(self.seen.screen(), Screen::Pods | Screen::Waiting)
        {
            self.leave();
        }
    }

    fn selected(&self) -> Option<TopRow> {
        rows(&self.seen).into_iter().nth(self.cursor)
    }

    fn press(&mut self, key: KeyPress, selected: Option<&TopRow>) {
        if key == KeyPress::Interrupt {
            self.done = true;
            return;
        }
        if self.help {
            self.help = false;
            return;
        }
        if self.typing {
            match key {
                KeyPress::Char(character) if self.seen.filter.len() < 64 => self.seen.filter.push(character),
                KeyPress::Backspace => drop(self.seen.filter.pop()),
                KeyPress::Enter => self.typing = false,
                KeyPress::Esc => {
                    self.typing = false;
                    self.seen.filter.clear();
                }
                _ => {}
            }
            self.cursor = 0;
            return;
        }
        let page = self.height().max(1);
        match key {
            KeyPress::Char('q') => self.done = true,
            KeyPress::Char('?') => self.help = true,
            KeyPress::Char('/') => self.typing = true,
            KeyPress::Char('s') => self.seen.sort = self.seen.sort.next(),
            KeyPress::Char('t') => self.seen.tree = !self.seen.tree,
            KeyPress::Char('p') if *self.seen.screen() != Screen::Pods => self.enter(Screen::Pods),
            KeyPress::Char('w') if *self.seen.screen() != Screen::Waiting => self.enter(Screen::Waiting),
            KeyPress::Up | KeyPress::Char('k') => self.cursor = self.cursor.saturating_sub(1),
            KeyPress::Down | KeyPress::Char('j') => self.cursor = self.cursor.saturating_add(1),
            KeyPress::PageUp => self.cursor = self.cursor.saturating_sub(page),
            KeyPress::PageDown => self.cursor = self.cursor.saturating_add(page),
            KeyPress::Home | KeyPress::Char('g') => self.cursor = 0,
            KeyPress::End | KeyPress::Char('G') => self.cursor = usize::MAX,
            KeyPress::Enter => match selected {
                Some(TopRow { of: Of::Node, node, .. }) => self.enter(Screen::Node(node.clone())),
                Some(TopRow {
                    of: Of::Gpu(_), node, ..
                }) if *self.seen.screen() == Screen::Cluster => {
                    self.enter(Screen::Node(node.clone()));
                }
                Some(TopRow { of: Of::Pod(uid, _), .. }) if !matches!(self.seen.screen(), Screen::Pod(_)) => {
                    self.enter(Screen::Pod(uid.clone()));
                }
                Some(TopRow {
                    of: Of::Waiting(key), ..
                }) => self.enter(Screen::Why(key.clone())),
                _ => {}
            },
            KeyPress::Esc if !self.seen.filter.is_empty() => self.seen.filter.clear(),
            KeyPress::Esc => self.leave(),
            _ => {}
        }
    }

    fn enter(&mut self, screen: Screen) {
        self.left.push(self.cursor);
        self.seen.screens.push(screen);
        self.seen.filter.clear();
        (self.cursor, self.above) = (0, 0);
    }

    fn leave(&mut self) {
        if self.seen.screens.len() > 1 {
            self.seen.screens.pop();
            self.seen.filter.clear();
            (self.cursor, self.above) = (self.left.pop().unwrap_or(0), 0);
        }
    }

    /// Put the cursor on an existing row, and show it. `selected` is the row that it was on, which may be elsewhere now.
    fn settle(&mut self, selected: Option<&TopRow>) {
        let rows = rows(&self.seen);
        let same = |a: &TopRow, b: &TopRow| (&a.node, &a.of) == (&b.node, &b.of);
        let found = selected.and_then(|selected| rows.iter().position(|row| same(row, selected)));
        self.cursor = found.unwrap_or(self.cursor).min(rows.len().saturating_sub(1));
        let height = self.height().max(1);
        self.above = self.above.clamp((self.cursor + 1).saturating_sub(height), self.cursor);
        self.above = self.above.min(rows.len().saturating_sub(height));
    }
}
