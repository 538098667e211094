//! The text of an answer for people: a sentence, the nodes in groups, the closest nodes in detail, and suggestions. The text fits on one screen.

use divvy_host::plain;
use divvy_model::{Health, MemoryUnit, MiB};
use divvy_why::{Answer, BoundShare, GpuAnswer, HolderAnswer, NodeAnswer, Obstacle, PodState, Reported, Suggestion, amount};

use crate::printer::paint;

/// The layout of an answer.
#[derive(Debug, Clone, Copy, Default)]
pub struct AnswerStyle {
    /// The width of the terminal in columns. With `None`, lines are not wrapped.
    pub width: Option<usize>,
    /// Whether to show every node, every GPU, and every holder.
    pub all_nodes: bool,
    /// Whether to show only the sentence and the best suggestion, because this is one answer of many.
    pub short: bool,
    /// Whether to use the terminal's colors.
    pub coloured: bool,
}

/// The number of GPUs to show on all nodes together, unless `all_nodes` is set. On each node, those with the most free memory
/// are shown.
const GPUS: usize = 4;
/// The number of holders to show for each GPU.
const HOLDERS: usize = 2;
/// The number of groups of nodes to show.
const GROUPS: usize = 6;
/// The number of pods to name if several equal pods share an answer.
const PODS: usize = 3;

/// Return the answer as text, which ends with a newline.
pub fn text(answer: &Answer, style: AnswerStyle) -> String {
    let mut page = AnswerPage {
        unit: MemoryUnit::new(answer.unit).unwrap_or_default(),
        style,
        lines: Vec::new(),
    };
    page.put("", "", &format!("{} {}", subject(answer), answer.message));
    if style.short {
        if let Some(best) = answer.suggestions.first() {
            page.put_suggestion("  ", "  ", best);
        }
    } else {
        page.body(answer);
    }
    let text = plain(&(page.lines.join("\n") + "\n")).into_owned();
    if style.coloured { coloured(&text, answer) } else { text }
}

/// Color the titles. The color of the first words shows the pod's state.
fn coloured(text: &str, answer: &Answer) -> String {
    let colour = match answer.state {
        PodState::Waiting => "1;33",
        PodState::Bound => "1;32",
        PodState::Ended | PodState::NoGpuMemory => "1",
    };
    let subject = plain(&subject(answer)).into_owned();
    let lines = text
        .lines()
        .enumerate()
        .map(|(number, line)| match line.strip_prefix(&subject).filter(|_| number == 0) {
            Some(rest) => format!("{}{rest}\n", paint(colour, &subject)),
            None if number == 0 => format!("{}\n", paint(colour, line)),
            None if line.ends_with(':') && !line.starts_with(' ') => format!("{}\n", paint("1", line)),
            None => format!("{line}\n"),
        });
    lines.collect()
}

/// Return the subject of the first sentence: `Pod ml/a`, or `Each of 4 pods of ReplicaSet a-6d5 in namespace ml (a-1, a-2, a-3 and 1 more)`.
fn subject(answer: &Answer) -> String {
    let pods = &answer.subject.pods;
    match (pods.as_slice(), &answer.subject.owner) {
        ([one], _) => format!("Pod {one}"),
        ([first, ..], Some(owner)) => {
            let mut names: Vec<&str> = pods.iter().map(|pod| pod.name.as_str()).take(PODS).collect();
            let more = pods.len() - names.len();
            let more = (more > 0).then(|| format!(" and {more} more"));
            let last = if more.is_none() { names.pop() } else { None };
            let last = last.map(|last| format!(" and {last}")).or(more).unwrap_or_default();
            format!(
                "Each of {} pods of {owner} in namespace {} ({}{last})",
                pods.len(),
                first.namespace,
                names.join(", ")
            )
        }
        _ => "The pod".to_owned(),
    }
}

struct AnswerPage {
    unit: MemoryUnit,
    style: AnswerStyle,
    lines: Vec<String>,
}

impl AnswerPage {
    /// Add a text, wrapped to the terminal's width. `first` and `rest` are the indentation of the first and of the other lines.
    fn put(&mut self, first: &str, rest: &str, text: &str) {
        match self.style.width {
            None => self.lines.push(format!("{first}{text}")),
            Some(width) => {
                let options = textwrap::Options::new(width.max(40))
                    .initial_indent(first)
                    .subsequent_indent(rest)
                    .break_words(false)
                    .word_splitter(textwrap::WordSplitter::NoHyphenation);
                self.lines.extend(textwrap::wrap(text, options).into_iter().map(String::from));
            }
        }
    }

    /// Add a suggestion. If its command does not fit on the current line, put the command on a line of its own, which is not
    /// wrapped, so that it can be copied.
    fn put_suggestion(&mut self, first: &str, rest: &str, suggestion: &Suggestion) {
        let command = suggestion.command.join(" ");
        self.put(first, rest, &suggestion.message);
        match self.lines.last_mut() {
            _ if command.is_empty() => {}
            Some(last) if self.style.width.is_none_or(|width| last.len() + 1 + command.len() <= width) => {
                last.push(' ');
                last.push_str(&command);
            }
            _ => self.lines.push(format!("{rest}{command}")),
        }
    }

    fn title(&mut self, title: &str) {
        self.lines.push(String::new());
        self.lines.push(title.to_owned());
    }

    fn body(&mut self, answer: &Answer) {
        if tells_more(answer) {
            for reported in &answer.reported {
                self.put("  ", "    ", &said(reported));
            }
        }
        // The shares of several pods are only in the JSON output.
        for share in answer.shares.iter().filter(|_| answer.subject.pods.len() == 1) {
            let text = self.share(share);
            self.put("  ", "    ", &text);
        }
        for hold in answer.holds.iter().filter(|hold| !answer.message.contains(&hold.message)) {
            self.put("  ", "    ", &format!("Also: {}.", hold.message.trim_end_matches('.')));
        }
        self.nodes(answer);
        self.suggestions(answer);
        let age = answer
            .age_seconds
            .map(|age| format!("The extender read the cluster {age} s ago."));
        let notes: Vec<&String> = answer.notes.iter().chain(&age).collect();
        if !notes.is_empty() {
            self.title("Note:");
        }
        for note in notes {
            self.put("  ", "  ", note);
        }
    }

    fn share(&self, share: &BoundShare) -> String {
        let size = amount(share.memory, self.unit);
        match share.index {
            Some(index) => format!("holds {size} of {} of node {}", named(index, &share.model), share.node),
            None if share.there.is_none() => format!(
                "holds {size} of GPU {} of node {}",
                share.uuid.as_deref().unwrap_or_default(),
                share.node
            ),
            None => format!(
                "holds {size} of GPU {}, which node {} does not have",
                share.uuid.as_deref().unwrap_or_default(),
                share.node
            ),
        }
    }

    fn nodes(&mut self, answer: &Answer) {
        let all = answer.groups.iter().map(|group| group.nodes).sum::<usize>();
        let shown = if self.style.all_nodes {
            &answer.nodes
        } else {
            &answer.closest
        };
        let fits = shown.iter().any(|node| node.fits);
        if (all > shown.len() && !fits) || self.style.all_nodes {
            self.groups(answer);
        }
        if shown.is_empty() {
            return;
        }
        self.title(match (self.style.all_nodes || all == shown.len(), fits, shown.len()) {
            (true, _, 1) => "The node:",
            (true, ..) => "The nodes:",
            (_, true, _) => "Nodes with room:",
            (_, _, 1) => "The closest node:",
            _ => "The closest nodes:",
        });
        let with_gpus = shown.iter().filter(|node| lacks_memory(node)).count();
        let per_node = if self.style.all_nodes {
            usize::MAX
        } else {
            GPUS / with_gpus.max(1)
        };
        for node in shown {
            self.node(node, per_node);
        }
    }

    fn groups(&mut self, answer: &Answer) {
        let most = if self.style.all_nodes { usize::MAX } else { GROUPS };
        let shown = answer.groups.iter().take(most);
        let pad = if answer.groups.iter().any(|group| group.nodes > 1) {
            ": "
        } else {
            ":"
        };
        let width = answer
            .groups
            .iter()
            .map(|group| group.nodes.to_string().len())
            .max()
            .unwrap_or(1);
        self.lines.push(String::new());
        for group in shown {
            let (count, s) = (group.nodes, if group.nodes == 1 { pad } else { "s:" });
            self.put(
                &format!("  {count:>width$} node{s} "),
                &" ".repeat(width + 10),
                &group.message,
            );
        }
        let rest = answer.groups.iter().skip(most);
        let (reasons, nodes) = (rest.clone().count(), rest.map(|group| group.nodes).sum::<usize>());
        if reasons > 0 {
            self.put(
                &format!("  {nodes:>width$} more "),
                "",
                &format!("for {reasons} other reasons (--all-nodes)"),
            );
        }
    }

    fn node(&mut self, node: &NodeAnswer, gpus: usize) {
        let reasons: Vec<&str> = node.obstacles.iter().map(|obstacle| obstacle.message.as_str()).collect();
        let reasons = match reasons.as_slice() {
            [] => "it has room".to_owned(),
            reasons => reasons.join("; "),
        };
        self.put(&format!("  {}: ", node.node), "    ", &reasons);
        let said = |obstacle: &Obstacle| {
            matches!(
                obstacle,
                Obstacle::TooSmall { .. } | Obstacle::NoGpuMemory | Obstacle::NoWholeGpus { .. } | Obstacle::Rules { .. }
            )
        };
        if !self.style.all_nodes && node.obstacles.iter().any(|obstacle| said(&obstacle.what)) {
            return;
        }
        // If the GPUs are not the obstacle, it is enough to show one with room.
        let gpus = if self.style.all_nodes || lacks_memory(node) { gpus } else { 1 };
        let mut order: Vec<&GpuAnswer> = node.gpus.iter().collect();
        if !self.style.all_nodes {
            order.sort_by_key(|gpu| (!gpu.fits, !gpu.allowed, std::cmp::Reverse(gpu.free), gpu.index));
        }
        for gpu in order.iter().take(gpus) {
            let text = self.gpu(gpu);
            self.put("    ", "      ", &text);
        }
        // If several nodes are shown, the other GPUs are not counted, because each node's line says how much one GPU has at most.
        let more = order.len().saturating_sub(gpus);
        if more > 0 && gpus > 1 {
            let s = if more == 1 { "" } else { "s" };
            self.put("    ", "", &format!("and {more} other GPU{s}"));
        }
    }

    /// Return the text about a GPU, such as `GPU 0 (NVIDIA A100): 8 of 40 GiB free; held by ml/a (30 GiB), ml/b (2 GiB)`.
    fn gpu(&self, gpu: &GpuAnswer) -> String {
        let name = named(gpu.index, &gpu.model);
        let mut text = match (gpu.whole, gpu.free == gpu.total) {
            (false, _) => {
                let cores = gpu.free_cores.map(|cores| format!(" and {cores} % of the compute time"));
                let (free, total) = (self.number(gpu.free), amount(gpu.total, self.unit));
                format!("{name}: {free} of {total}{} free", cores.unwrap_or_default())
            }
            // Pods without an allocation may use it: only the kubelet knows.
            (true, true) => format!("{name} is not allocated"),
            (true, false) => format!("{name} is allocated"),
        };
        if gpu.health != Health::Ok {
            let word = match gpu.health {
                Health::Lost => "is lost",
                Health::Testing => "is being tested",
                Health::Ok | Health::Failed => "failed",
            };
            let reason = gpu.reason.as_ref().map(|reason| format!(" ({reason})")).unwrap_or_default();
            text = format!("{name} {word}{reason}");
        } else if !gpu.allowed {
            text.push_str(", and the pod's annotations do not allow it");
        }
        let most = if self.style.all_nodes { usize::MAX } else { HOLDERS };
        let holders: Vec<String> = gpu.held_by.iter().take(most).map(|holder| self.holder(holder)).collect();
        if !holders.is_empty() {
            text.push_str(&format!("; held by {}", holders.join(", ")));
        }
        let rest = gpu.held_by.iter().skip(most);
        let (count, sum) = (
            rest.clone().count(),
            rest.fold(MiB::ZERO, |sum, holder| sum.saturating_add(holder.memory)),
        );
        if count > 0 {
            let s = if count == 1 { "" } else { "s" };
            text.push_str(&format!(" and {count} other pod{s} ({})", amount(sum, self.unit)));
        }
        text
    }

    /// Return an amount as a number without its unit, as for the 8 in `8 of 40 GiB`.
    fn number(&self, memory: MiB) -> String {
        let text = amount(memory, self.unit);
        text.split(' ').next().unwrap_or_default().to_owned()
    }

    fn holder(&self, holder: &HolderAnswer) -> String {
        let size = match holder.cores {
            0 => amount(holder.memory, self.unit),
            cores => format!("{}, {cores} %", amount(holder.memory, self.unit)),
        };
        let state = match holder.state.as_str() {
            "beingDeleted" => ", being deleted",
            "beingBound" => ", being bound",
            "deleted" => ", deleted, and its containers may still run",
            "nominated" => ", reserved for it, because it preempted others",
            _ => "",
        };
        match &holder.pod {
            Some(pod) => format!("{pod} ({size}{state})"),
            None if holder.hidden => format!("another pod ({size}{state})"),
            None => format!("containers of deleted pods ({size})"),
        }
    }

    fn suggestions(&mut self, answer: &Answer) {
        if answer.suggestions.is_empty() {
            return;
        }
        self.title(match answer.subject.pods.len() {
            1 => "Any one of these would let the pod start:",
            _ => "Any one of these would let one of the pods start:",
        });
        for (number, suggestion) in (1..).zip(&answer.suggestions) {
            self.put_suggestion(&format!("  {number}. "), "     ", suggestion);
        }
    }
}

/// Report whether one of the node's obstacles is that pods hold what this pod needs of the GPUs.
fn lacks_memory(node: &NodeAnswer) -> bool {
    node.obstacles.iter().any(|obstacle| {
        matches!(
            obstacle.what,
            Obstacle::GpuMemory { .. } | Obstacle::GpuCores { .. } | Obstacle::WholeGpus { .. }
        )
    })
}

/// Report whether the messages of the scheduler and the kubelet add anything to the answer. For a pod that waits for room, these
/// messages only count the nodes that the answer already lists.
fn tells_more(answer: &Answer) -> bool {
    let fits = answer.closest.iter().any(|node| node.fits);
    answer.state != PodState::Waiting || fits || !answer.holds.is_empty() || answer.closest.is_empty()
}

fn said(reported: &Reported) -> String {
    let Reported { by, reason, message } = reported;
    match message.as_str() {
        "" => format!("{by} says: {reason}"),
        message => format!("{by} says: {}", without_preemption(message)),
    }
}

/// Remove the part of kube-scheduler's message that is about preemption, which does not help to explain GPU memory.
fn without_preemption(line: &str) -> &str {
    let line = line.split(" preemption: ").next().unwrap_or(line);
    line.strip_suffix(" no new claims to deallocate,").unwrap_or(line)
}

fn named(index: u32, model: &str) -> String {
    match model {
        "" => format!("GPU {index}"),
        model => format!("GPU {index} ({model})"),
    }
}
