//! A GPU as a bar: a segment for each pod. The color is that of the pod's namespace; what is allocated and idle is hatched. A GPU that is divided, such as by MIG,
//! is one bar with a cell for each part. A text says the same.

use divvy_model::usage::Usage;
use divvy_view::amounts::{self, Amounts};
use divvy_view::{GpuView, NodeView, PodView};
use maud::{Markup, Render, html};

use crate::text::{counted, memory, part, percent, shown};

/// The width of a bar. The markup has it in percent with one decimal.
const WIDTH: u64 = 1000;
/// The number of colors in the style sheet.
const COLORS: u32 = 12;

/// The color of a namespace: a number for the classes and patterns. It is the same on all pages, and after each start of the program.
#[derive(Clone, Copy)]
pub(crate) struct NamespaceColor(u32);

impl NamespaceColor {
    pub(crate) fn of(namespace: &str) -> NamespaceColor {
        // FNV-1a.
        let hash = namespace.bytes().fold(0x811c_9dc5_u32, |hash, byte| {
            (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193)
        });
        NamespaceColor((hash ^ (hash >> 16)) % COLORS)
    }
}

impl Render for NamespaceColor {
    fn render_to(&self, buffer: &mut String) {
        self.0.render_to(buffer);
    }
}

/// A length in the bar.
#[derive(Clone, Copy)]
struct Length(u64);

impl Render for Length {
    fn render_to(&self, buffer: &mut String) {
        let (whole, rest) = (self.0 / 10, self.0 % 10);
        match rest {
            0 => format_args!("{whole}%").render_to(buffer),
            _ => format_args!("{whole}.{rest}%").render_to(buffer),
        }
    }
}

/// Return `part` of `all`, as a part of `width`.
fn scaled(part: u64, all: u64, width: u64) -> u64 {
    let scaled = u128::from(part.min(all)) * u128::from(width);
    u64::try_from(scaled.checked_div(u128::from(all)).unwrap_or(0)).unwrap_or(width)
}

/// A GPU, or the parts of a divided GPU, which are shown in one bar.
pub(crate) struct GpuBar<'a> {
    pub(crate) gpus: Vec<&'a GpuView>,
}

impl<'a> GpuBar<'a> {
    /// Return the bars of a node.
    pub(crate) fn of(node: &'a NodeView) -> Vec<GpuBar<'a>> {
        let mut bars: Vec<GpuBar<'a>> = Vec::new();
        for gpu in &node.gpus {
            let parent = gpu.partition.as_ref().map(|of| &of.parent);
            let same = |bar: &&mut GpuBar<'a>| {
                parent.is_some() && bar.gpus.iter().all(|of| of.partition.as_ref().map(|of| &of.parent) == parent)
            };
            match bars.last_mut().filter(same) {
                Some(bar) => bar.gpus.push(gpu),
                None => bars.push(GpuBar { gpus: vec![gpu] }),
            }
        }
        bars
    }

    /// Return the amounts of all parts together.
    pub(crate) fn amounts(&self, node: &NodeView, usage: Option<&Usage>) -> Amounts {
        amounts::of_gpus(node, self.gpus.iter().copied(), usage)
    }

    /// Return the UUIDs of the GPU and of its parts. Power, temperature, and clocks are measured of the GPU that is divided, and not of its parts.
    pub(crate) fn uuids(&self) -> impl Iterator<Item = &'a str> {
        let parent = self
            .gpus
            .first()
            .and_then(|gpu| gpu.partition.as_ref())
            .map(|of| of.parent.as_str());
        parent
            .into_iter()
            .chain(self.gpus.iter().filter_map(|gpu| gpu.uuid.as_deref()))
    }

    /// Report whether something is wrong with one of the parts.
    pub(crate) fn has_problem(&self) -> bool {
        self.gpus.iter().any(|gpu| gpu.message.is_some())
    }

    /// Return the bar's name among those of its node.
    pub(crate) fn name(&self) -> String {
        let index = self.gpus.first().map_or(0, |gpu| gpu.index);
        match self.gpus.as_slice() {
            [_] | [] => index.to_string(),
            [.., last] => format!("{index}–{}", last.index),
        }
    }

    /// Draw the bar. `pods`: its text names the pods, and so does a pointer that rests on them.
    pub(crate) fn draw(&self, node: &NodeView, usage: Option<&Usage>, pods: bool) -> Markup {
        let total = self.gpus.iter().fold(0_u64, |sum, gpu| sum.saturating_add(gpu.total));
        let count = self.gpus.len() as u64;
        // Parts that are only offered as a whole have no units, and all the same width.
        let width = |gpu: &GpuView| {
            if total == 0 {
                WIDTH / count
            } else {
                scaled(gpu.total, total, WIDTH)
            }
        };
        let places = in_a_row(0, self.gpus.iter().map(|gpu| width(gpu)));
        html! {
            svg.bar.bad[self.has_problem()] role="img" aria-label=(self.alternative(node, usage, pods)) width="100%" height="16" {
                rect.track.off[self.gpus.iter().all(|gpu| !gpu.offered)] width="100%" {}
                @for (gpu, place) in self.gpus.iter().zip(places) {
                    (cell(node, gpu, usage, place, pods))
                    @if place.from > 0 { rect.gap x=(Length(place.from)) width="4" {} }
                }
            }
        }
    }

    /// Return what the bar shows, as a sentence.
    fn alternative(&self, node: &NodeView, usage: Option<&Usage>, pods: bool) -> String {
        let parts: Vec<String> = self.gpus.iter().map(|gpu| in_words(node, gpu, usage, pods)).collect();
        match parts.as_slice() {
            [one] => one.clone(),
            _ => format!("{}: {}", counted(parts.len(), "part"), parts.join(". ")),
        }
    }
}

/// A part of a bar.
#[derive(Clone, Copy)]
struct BarPart {
    from: u64,
    width: u64,
}

/// Put parts of these widths next to each other.
fn in_a_row(from: u64, widths: impl Iterator<Item = u64>) -> Vec<BarPart> {
    let next = |end: &mut u64, width| {
        let from = *end;
        *end = end.saturating_add(width);
        Some(BarPart { from, width })
    };
    widths.scan(from, next).collect()
}

/// Draw the segments of a GPU into a part of the bar.
fn cell(node: &NodeView, gpu: &GpuView, usage: Option<&Usage>, cell: BarPart, titles: bool) -> Markup {
    let whole = amounts::of_gpu(node, gpu, usage);
    let held = if gpu.total == 0 { 0 } else { held(gpu) };
    // More than there is can be allocated and held while a node is being changed.
    let all = whole.total.max(whole.allocated.saturating_add(held));
    let of: Vec<Amounts> = gpu.pods.iter().map(|pod| amounts::of_pod(node, gpu, pod, usage)).collect();
    // A GPU that is only offered as a whole has no units.
    let width = |(pod, of): (&PodView, &Amounts)| {
        if gpu.total == 0 && pod.whole {
            cell.width
        } else {
            scaled(of.allocated, all, cell.width)
        }
    };
    let places = in_a_row(cell.from, gpu.pods.iter().zip(&of).map(width));
    let end = places.last().map_or(cell.from, |place| place.from + place.width);
    let title = |pod: &PodView, of: &Amounts| titles.then(|| html! { title { (pod_in_words(pod, of)) } });
    html! {
        @for ((pod, of), place) in gpu.pods.iter().zip(&of).zip(places) {
            @let color = NamespaceColor::of(&pod.namespace);
            @let used = if gpu.total == 0 { place.width } else { scaled(of.within, all, cell.width).min(place.width) };
            @match of.used {
                None => { (segment(&html! { "n" (color) " unknown" }, place, title(pod, of))) }
                Some(_) if used == place.width => { (segment(&html! { "n" (color) }, place, title(pod, of))) }
                Some(_) => {
                    rect.share x=(Length(place.from)) width=(Length(place.width)) fill={ "url(#i" (color) ")" } { @if let Some(title) = title(pod, of) { (title) } }
                    @if used > 0 { (segment(&html! { "n" (color) }, BarPart { width: used, ..place }, None)) }
                }
            }
            @if of.over > 0 { rect.over x=(Length(place.from)) width=(Length(place.width)) {} }
        }
        @if held > 0 { rect.held x=(Length(end)) width=(Length(scaled(held, all, cell.width))) fill="url(#held)" {} }
    }
}

fn segment(class: &Markup, place: BarPart, title: Option<Markup>) -> Markup {
    html! { rect class=(class.0) x=(Length(place.from)) width=(Length(place.width)) { @if let Some(title) = title { (title) } } }
}

/// Return the memory in bytes that pods that have ended still hold.
pub(crate) fn held(gpu: &GpuView) -> u64 {
    gpu.held_mib.saturating_mul(1 << 20)
}

/// Return what is neither allocated nor free, as words.
pub(crate) fn held_in_words(bytes: u64) -> String {
    format!("{} held by ended pods", memory(bytes))
}

/// Return what is on a GPU, as a sentence without a period. `pods`: with the name of each pod, and not only their number.
pub(crate) fn in_words(node: &NodeView, gpu: &GpuView, usage: Option<&Usage>, pods: bool) -> String {
    let amounts = amounts::of_gpu(node, gpu, usage);
    let mut words = vec![format!("GPU {}", gpu.index)];
    words.extend(gpu.partition.as_ref().map(|of| shown(&of.profile)));
    words.extend(gpu.message.as_deref().map(shown));
    if gpu.total > 0 {
        words.push(format!("{} allocated", part(amounts.allocated, amounts.total)));
    }
    words.extend(amounts.used.map(|used| format!("{} used", memory(used))));
    // How busy an undivided GPU is stands next to its bar.
    if let (Some(_), Some(busy)) = (&gpu.partition, amounts.busy) {
        words.push(format!("{} busy", percent(Some(busy))));
    }
    if gpu.held_mib > 0 {
        words.push(held_in_words(held(gpu)));
    }
    if pods && !gpu.pods.is_empty() {
        let each = gpu.pods.iter();
        words.extend(each.map(|pod| pod_in_words(pod, &amounts::of_pod(node, gpu, pod, usage))));
    } else {
        words.push(counted(gpu.pods.len(), "pod"));
    }
    words.join(", ")
}

fn pod_in_words(pod: &PodView, amounts: &Amounts) -> String {
    let share = if pod.whole {
        "the whole GPU".to_owned()
    } else {
        memory(amounts.allocated)
    };
    let over = if amounts.over > 0 {
        format!(", over its share by {}", memory(amounts.over))
    } else {
        String::new()
    };
    let used = amounts
        .used
        .map(|used| format!(" ({} used{over})", memory(used)))
        .unwrap_or_default();
    format!("{}/{} {share}{used}", shown(&pod.namespace), shown(&pod.name))
}

/// Define the patterns that bars refer to, once for a page.
pub(crate) fn patterns() -> Markup {
    html! {
        svg.patterns width="0" height="0" aria-hidden="true" focusable="false" {
            defs {
                @for color in 0..COLORS { (idle(&html! { "i" (color) }, &html! { "n" (color) })) }
                (idle(&html! { "idle" }, &html! { "neutral" }))
                pattern id="held" width="4" height="4" patternUnits="userSpaceOnUse" { circle.dot cx="2" cy="2" r="1.1" {} }
            }
        }
    }
}

/// Define the pattern of memory that is allocated and idle.
fn idle(id: &Markup, class: &Markup) -> Markup {
    html! {
        pattern id=(id.0) width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)" {
            rect.stripe width="6" height="6" {}
            rect class=(class.0) width="2.6" height="6" {}
        }
    }
}

/// Say what the looks of a bar mean.
pub(crate) fn legend<'a>(namespaces: impl Iterator<Item = &'a str>) -> Markup {
    let swatch = |content: Markup| html! { svg.swatch width="18" height="12" aria-hidden="true" focusable="false" { (content) } };
    let plain = html! { rect.neutral width="18" height="12" {} };
    let idle = html! { rect.share width="18" height="12" fill="url(#idle)" {} };
    let over = html! { (plain) rect.over width="18" height="4" {} };
    html! {
        ul.legend aria-label="What the looks of a bar mean" {
            li { (swatch(plain.clone())) "used" }
            li { (swatch(idle)) "allocated and idle" }
            li { (swatch(html! { rect.neutral.unknown width="18" height="12" {} })) "allocated, not measured" }
            li { (swatch(over)) "over its share" }
            li { (swatch(html! { rect.track width="18" height="12" {} })) "free" }
        }
        ul.legend aria-label="The colors of the namespaces" {
            @for namespace in namespaces { li { (swatch(html! { rect class={ "n" (NamespaceColor::of(namespace)) } width="18" height="12" {} })) (shown(namespace)) } }
        }
    }
}
