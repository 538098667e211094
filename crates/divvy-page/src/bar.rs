//! A GPU as a bar: a segment for each pod. The color is that of the pod's namespace; what is allocated and idle is hatched. A GPU that is divided, such as by MIG,
//! is one bar with a cell for each part. A text says the same.

use divvy_model::usage::Usage;
use divvy_view::amounts::{self, Amounts};
use divvy_view::{GpuView, NodeView, PodView};
use maud::{Markup, Render, html};

use crate::text::{counted, memory, percent, shown};

/// The width of a bar. The markup has it in percent with two decimals.
const WIDTH: u64 = 10_000;
/// The number of colors in the style sheet.
const COLORS: u32 = 12;

/// Return the class that has the color of a namespace.
pub(crate) fn color(namespace: &str) -> String {
    // FNV-1a: the same color on all pages, and after each start of the program.
    let hash = namespace.bytes().fold(0x811c_9dc5_u32, |hash, byte| {
        (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193)
    });
    format!("n{}", (hash ^ (hash >> 16)) % COLORS)
}

/// A length in the bar.
#[derive(Clone, Copy)]
struct Length(u64);

impl Render for Length {
    fn render_to(&self, buffer: &mut String) {
        let (whole, rest) = (self.0 / 100, self.0 % 100);
        match rest {
            0 => format_args!("{whole}%").render_to(buffer),
            _ => format_args!("{whole}.{rest:02}%").render_to(buffer),
        }
    }
}

/// Return `part` of `all`, as a part of `width`.
fn scaled(part: u64, all: u64, width: u64) -> u64 {
    let scaled = u128::from(part.min(all)) * u128::from(width);
    u64::try_from(scaled.checked_div(u128::from(all)).unwrap_or(0)).unwrap_or(width)
}

/// A GPU, or the parts of a divided GPU, which are shown in one bar.
pub(crate) struct Bar<'a> {
    pub(crate) gpus: Vec<&'a GpuView>,
}

impl<'a> Bar<'a> {
    /// Return the bars of a node.
    pub(crate) fn of(node: &'a NodeView) -> Vec<Bar<'a>> {
        let mut bars: Vec<Bar<'a>> = Vec::new();
        for gpu in &node.gpus {
            let parent = gpu.partition.as_ref().map(|of| &of.parent);
            let same = |bar: &&mut Bar<'a>| {
                parent.is_some() && bar.gpus.iter().all(|of| of.partition.as_ref().map(|of| &of.parent) == parent)
            };
            match bars.last_mut().filter(same) {
                Some(bar) => bar.gpus.push(gpu),
                None => bars.push(Bar { gpus: vec![gpu] }),
            }
        }
        bars
    }

    /// Return the amounts of all parts together.
    pub(crate) fn amounts(&self, node: &NodeView, usage: Option<&Usage>) -> Amounts {
        amounts::of_gpus(node, self.gpus.iter().copied(), usage)
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

    /// Draw the bar. `titles`: with the names of the pods for a pointer that rests on them.
    pub(crate) fn draw(&self, node: &NodeView, usage: Option<&Usage>, titles: bool) -> Markup {
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
            svg.bar.bad[self.has_problem()] role="img" aria-label=(self.alternative(node, usage)) width="100%" height="16" {
                rect.track.off[self.gpus.iter().all(|gpu| !gpu.offered)] width="100%" height="16" {}
                @for (gpu, place) in self.gpus.iter().zip(places) {
                    (cell(node, gpu, usage, place, titles))
                    @if place.from > 0 { rect.gap x=(Length(place.from)) width="4" height="16" {} }
                }
            }
        }
    }

    /// Return what the bar shows, as a sentence.
    fn alternative(&self, node: &NodeView, usage: Option<&Usage>) -> String {
        let parts: Vec<String> = self.gpus.iter().map(|gpu| in_words(node, gpu, usage)).collect();
        match parts.as_slice() {
            [one] => one.clone(),
            _ => format!("{}: {}", counted(parts.len(), "part"), parts.join(". ")),
        }
    }
}

/// A part of a bar.
#[derive(Clone, Copy)]
struct Place {
    from: u64,
    width: u64,
}

/// Put parts of these widths next to each other.
fn in_a_row(from: u64, widths: impl Iterator<Item = u64>) -> Vec<Place> {
    let next = |end: &mut u64, width| {
        let from = *end;
        *end = end.saturating_add(width);
        Some(Place { from, width })
    };
    widths.scan(from, next).collect()
}

/// Draw the segments of a GPU into a part of the bar.
fn cell(node: &NodeView, gpu: &GpuView, usage: Option<&Usage>, cell: Place, titles: bool) -> Markup {
    let whole = amounts::of_gpu(node, gpu, usage);
    let held = if gpu.total == 0 { 0 } else { held(gpu) };
    // More than there is can be allocated while a node is being changed.
    let all = whole
        .total
        .max(whole.allocated)
        .saturating_add(held.saturating_sub(whole.free()));
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
    html! {
        @for ((pod, of), place) in gpu.pods.iter().zip(&of).zip(places) {
            @let end = place.from + place.width;
            rect class={ (color(&pod.namespace)) @if of.used.is_none() { " unknown" } } x=(Length(place.from)) width=(Length(place.width)) height="16" {
                @if titles { title { (pod_in_words(pod, of)) } }
            }
            @if of.used.is_some() && gpu.total > 0 {
                @let used = scaled(of.within, all, cell.width).min(place.width);
                @if used < place.width { rect.idle x=(Length(place.from + used)) width=(Length(place.width - used)) height="16" fill="url(#idle)" {} }
                @if of.over > 0 { rect.over x=(Length(place.from)) width=(Length(place.width)) height="4" {} }
            }
            rect.edge x=(Length(end)) width="1" height="16" {}
        }
        @if held > 0 { rect.held x=(Length(end)) width=(Length(scaled(held, all, cell.width))) height="16" fill="url(#held)" {} }
    }
}

/// Return the memory in bytes that pods that have ended still hold.
pub(crate) fn held(gpu: &GpuView) -> u64 {
    gpu.held_mib.saturating_mul(1 << 20)
}

/// Return what is on a GPU, as a sentence without a period.
pub(crate) fn in_words(node: &NodeView, gpu: &GpuView, usage: Option<&Usage>) -> String {
    let amounts = amounts::of_gpu(node, gpu, usage);
    let mut words = vec![format!("GPU {}", gpu.index)];
    words.extend(gpu.partition.as_ref().map(|of| shown(&of.profile)));
    words.extend(gpu.message.as_deref().map(shown));
    if gpu.total > 0 {
        words.push(format!(
            "{} of {} allocated",
            memory(amounts.allocated),
            memory(amounts.total)
        ));
    }
    words.extend(amounts.used.map(|used| format!("{} used", memory(used))));
    words.extend(amounts.busy.map(|busy| format!("{} busy", percent(Some(busy)))));
    if gpu.held_mib > 0 {
        words.push(format!("{} held by ended pods", memory(held(gpu))));
    }
    if gpu.pods.is_empty() {
        words.push("no pods".to_owned());
    }
    words.extend(
        gpu.pods
            .iter()
            .map(|pod| pod_in_words(pod, &amounts::of_pod(node, gpu, pod, usage))),
    );
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
                pattern id="idle" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)" { rect.stripe width="3.4" height="6" {} }
                pattern id="held" width="4" height="4" patternUnits="userSpaceOnUse" { circle.dot cx="2" cy="2" r="1.1" {} }
            }
        }
    }
}

/// Say what the looks of a bar mean.
pub(crate) fn legend<'a>(namespaces: impl Iterator<Item = &'a str>) -> Markup {
    let swatch = |content: Markup| html! { svg.swatch width="18" height="12" aria-hidden="true" focusable="false" { (content) } };
    let plain = html! { rect.neutral width="18" height="12" {} };
    let idle = html! { (plain) rect.idle width="18" height="12" fill="url(#idle)" {} };
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
            @for namespace in namespaces { li { (swatch(html! { rect class=(color(namespace)) width="18" height="12" {} })) (shown(namespace)) } }
        }
    }
}
