//! `divvy.dev/gpu-prefer: fastest`, compared with published figures.
//!
//! The figure of a product is the geometric mean of its dense FP16 (or BF16) throughput with FP32 accumulation and its
//! memory bandwidth. On a product without tensor cores, the throughput is that of FP32, or of FP16 where that is published.
//! Sources, by NVIDIA:
//!
//! - whitepapers: Tesla P100, Turing, A100 (table 5), GA102 (appendices A and B), Ada (appendix A), H100, RTX Blackwell
//! - data sheets of the cards. For RTX 5060, RTX 3080 Ti Laptop, and RTX 4090 Laptop: the product pages, from which the
//!   tensor throughput is derived. "AI TOPS" are FP4 with sparsity and FP16 accumulation; a sixteenth is FP16 with FP32
//!   accumulation. In GA102 and AD103, FP16 with FP32 accumulation is twice as fast as FP32.
//! - the highest clocks as `nvidia-smi -q -d CLOCK` shows them ("Max Clocks"). For data center cards other than Hopper and B200,
//!   they are the boost clocks.

use divvy_model::{Node, Prefer};
use divvy_placement::NodeState;

use super::fixture::{GIB, divvy_node, edit_gpu};

#[derive(Debug, Clone, Copy)]
struct Card {
    model: &'static str,
    cc: &'static str,
    sms: u32,
    /// The published boost clock.
    boost_mhz: u32,
    /// The highest clock, as the driver reports it.
    highest_mhz: u32,
    /// The published memory bandwidth in GB/s.
    bandwidth_gbs: u32,
    /// Published FP32 throughput, in 10¹¹ per second.
    fp32: u32,
    /// Published dense FP16 throughput with FP32 accumulation, in 10¹¹ per second.
    fp16: u32,
}

const fn card(
    (model, cc): (&'static str, &'static str),
    sms: u32,
    (boost_mhz, highest_mhz): (u32, u32),
    bandwidth_gbs: u32,
    (fp32, fp16): (u32, u32),
) -> Card {
    Card {
        model,
        cc,
        sms,
        boost_mhz,
        highest_mhz,
        bandwidth_gbs,
        fp32,
        fp16,
    }
}

#[rustfmt::skip]
const CARDS: [Card; 53] = [
    // Data center.
    card(("Tesla K80", "3.7"), 13, (875, 875), 240, (44, 44)),
    card(("Tesla M60", "5.2"), 16, (1178, 1177), 160, (48, 48)),
    card(("Tesla P4", "6.1"), 20, (1114, 1531), 192, (57, 57)),
    card(("Tesla P40", "6.1"), 30, (1531, 1531), 346, (118, 118)),
    card(("Tesla P100-PCIE-16GB", "6.0"), 56, (1303, 1328), 732, (93, 187)),
    card(("Tesla P100-SXM2-16GB", "6.0"), 56, (1480, 1480), 732, (106, 212)),
    card(("Tesla V100-PCIE-16GB", "7.0"), 80, (1380, 1380), 900, (141, 1130)),
    card(("Tesla V100-SXM2-16GB", "7.0"), 80, (1530, 1530), 900, (157, 1250)),
    card(("Tesla T4", "7.5"), 40, (1590, 1590), 320, (81, 650)),
    card(("NVIDIA A2", "8.6"), 10, (1770, 1770), 200, (45, 180)),
    card(("NVIDIA A16", "8.6"), 10, (1755, 1755), 200, (45, 179)),
    card(("NVIDIA A10", "8.6"), 72, (1695, 1695), 600, (312, 1250)),
    card(("NVIDIA A40", "8.6"), 84, (1740, 1740), 696, (374, 1497)),
    card(("NVIDIA A30", "8.0"), 56, (1440, 1440), 933, (103, 1650)),
    card(("NVIDIA A100-PCIE-40GB", "8.0"), 108, (1410, 1410), 1555, (195, 3120)),
    card(("NVIDIA A100-SXM4-40GB", "8.0"), 108, (1410, 1410), 1555, (195, 3120)),
    card(("NVIDIA A100 80GB PCIe", "8.0"), 108, (1410, 1410), 1935, (195, 3120)),
    card(("NVIDIA A100-SXM4-80GB", "8.0"), 108, (1410, 1410), 2039, (195, 3120)),
    card(("NVIDIA L4", "8.9"), 58, (2040, 2040), 300, (303, 1210)),
    card(("NVIDIA L40", "8.9"), 142, (2490, 2490), 864, (905, 1811)),
    card(("NVIDIA L40S", "8.9"), 142, (2520, 2520), 864, (916, 3621)),
    card(("NVIDIA H100 PCIe", "9.0"), 114, (1755, 1755), 2039, (512, 7560)),
    card(("NVIDIA H100 NVL", "9.0"), 132, (1785, 1785), 3938, (600, 8350)),
    card(("NVIDIA H100 80GB HBM3", "9.0"), 132, (1980, 1980), 3352, (669, 9894)),
    card(("NVIDIA H200", "9.0"), 132, (1980, 1980), 4800, (669, 9894)),
    card(("NVIDIA GH200 480GB", "9.0"), 132, (1980, 1980), 4000, (669, 9894)),
    card(("NVIDIA B200", "10.0"), 148, (1965, 1965), 8000, (750, 22500)),
    // Workstations.
    card(("Quadro RTX 6000", "7.5"), 72, (1770, 2100), 672, (163, 1305)),
    card(("Quadro RTX 8000", "7.5"), 72, (1770, 2100), 672, (163, 1305)),
    card(("TITAN RTX", "7.5"), 72, (1770, 2100), 672, (163, 1305)),
    card(("NVIDIA RTX A2000", "8.6"), 26, (1200, 2100), 288, (80, 319)),
    card(("NVIDIA RTX A4000", "8.6"), 48, (1560, 2100), 448, (192, 767)),
    card(("NVIDIA RTX A5000", "8.6"), 64, (1695, 2100), 768, (278, 1111)),
    card(("NVIDIA RTX A6000", "8.6"), 84, (1800, 2100), 768, (387, 1548)),
    card(("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "12.0"), 188, (2617, 3090), 1792, (1250, 5038)),
    // Desktops.
    card(("NVIDIA GeForce GTX 1080 Ti", "6.1"), 28, (1582, 1911), 484, (113, 113)),
    card(("NVIDIA GeForce GTX 1660", "7.5"), 22, (1785, 2130), 192, (50, 100)),
    card(("NVIDIA GeForce RTX 2080 Ti", "7.5"), 68, (1545, 2100), 616, (134, 538)),
    card(("NVIDIA GeForce RTX 3060", "8.6"), 28, (1777, 2100), 360, (127, 255)),
    card(("NVIDIA GeForce RTX 3070", "8.6"), 46, (1725, 2100), 448, (203, 406)),
    card(("NVIDIA GeForce RTX 3080", "8.6"), 68, (1710, 2100), 760, (298, 595)),
    card(("NVIDIA GeForce RTX 3090", "8.6"), 82, (1695, 2100), 936, (356, 710)),
    card(("NVIDIA GeForce RTX 4060", "8.9"), 24, (2460, 3105), 272, (151, 303)),
    card(("NVIDIA GeForce RTX 4070", "8.9"), 46, (2475, 3105), 504, (291, 583)),
    card(("NVIDIA GeForce RTX 4080", "8.9"), 76, (2505, 3105), 717, (487, 975)),
    card(("NVIDIA GeForce RTX 4090", "8.9"), 128, (2520, 3105), 1008, (826, 1652)),
    card(("NVIDIA GeForce RTX 5060", "12.0"), 30, (2497, 3090), 448, (192, 384)),
    card(("NVIDIA GeForce RTX 5070", "12.0"), 48, (2512, 3090), 672, (309, 617)),
    card(("NVIDIA GeForce RTX 5080", "12.0"), 84, (2617, 3090), 960, (563, 1126)),
    card(("NVIDIA GeForce RTX 5090", "12.0"), 170, (2407, 3090), 1792, (1048, 2095)),
    // Laptops.
    card(("NVIDIA GeForce RTX 3080 Ti Laptop GPU", "8.6"), 58, (1590, 2100), 512, (236, 472)),
    card(("NVIDIA GeForce RTX 4090 Laptop GPU", "8.9"), 76, (2040, 3105), 576, (397, 794)),
    card(("NVIDIA GeForce RTX 4060 Laptop GPU", "8.9"), 24, (2370, 3105), 256, (146, 291)),
];

/// Return the published figure of a card: the square of the geometric mean.
fn published(card: &Card) -> u64 {
    u64::from(card.fp16) * u64::from(card.bandwidth_gbs)
}

/// What an agent reports about a card.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Agent {
    /// Everything.
    Now,
    /// No memory bandwidth, because the agent or the driver is older.
    Older,
    /// A product name that means nothing.
    UnknownProduct,
}

fn ranked(card: &Card, agent: Agent) -> u64 {
    let mut node = divvy_node("n", &[8]);
    edit_gpu(&mut node, 0, |gpu| {
        gpu.model = match agent {
            Agent::UnknownProduct => "Graphics Device".to_owned(),
            _ => card.model.to_owned(),
        };
        gpu.cc = card.cc.to_owned();
        (gpu.sms, gpu.clock_mhz) = (card.sms, card.highest_mhz);
        gpu.bandwidth_gbs = if agent == Agent::Older { 0 } else { card.bandwidth_gbs };
    });
    rank_of(&node)
}

fn rank_of(node: &Node) -> u64 {
    NodeState::read(node, GIB).gpus[0].preference(Some(Prefer::Fastest))
}

/// Return the pairs of cards that are ranked in the wrong order, although their published figures differ by more than this
/// percentage.
fn wrong(percent: u64, agents: (Agent, Agent)) -> Vec<String> {
    let mut found = Vec::new();
    for fast in &CARDS {
        for slow in &CARDS {
            // The figures are squares.
            let differ = published(fast) * 10_000 > published(slow) * (100 + percent) * (100 + percent);
            if differ && ranked(fast, agents.0) <= ranked(slow, agents.1) {
                found.push(format!(
                    "{} {:?} is not before {} {:?}",
                    fast.model, agents.0, slow.model, agents.1
                ));
            }
        }
    }
    found
}

#[test]
fn the_table_is_consistent_with_itself() {
    for card in &CARDS {
        let cores = match card.cc {
            "3.7" => 192,
            "6.0" | "7.0" | "7.5" | "8.0" => 64,
            _ => 128,
        };
        // In 10¹¹ per second.
        let fp32 = u64::from(card.sms) * cores * 2 * u64::from(card.boost_mhz) / 100_000;
        let published = u64::from(card.fp32);
        assert!(
            fp32.abs_diff(published) * 100 <= published * 5,
            "{}: {fp32}, published {published}",
            card.model
        );
        assert!(card.highest_mhz + 1 >= card.boost_mhz, "{}", card.model);
    }
}

#[test]
fn gpus_are_ranked_as_their_published_figures_are() {
    assert_eq!(wrong(5, (Agent::Now, Agent::Now)), [""; 0]);
}

/// The estimates are coarse, so only figures that differ by more than a certain percentage are sure to be ranked correctly.
#[test]
fn gpus_of_which_less_is_known_are_ranked_by_estimates() {
    for (percent, agents) in [
        (40, (Agent::Now, Agent::Older)),
        (40, (Agent::Older, Agent::Now)),
        (90, (Agent::Older, Agent::Older)),
        (70, (Agent::UnknownProduct, Agent::UnknownProduct)),
        (120, (Agent::Now, Agent::UnknownProduct)),
        (5, (Agent::UnknownProduct, Agent::Now)),
    ] {
        assert_eq!(wrong(percent, agents), [""; 0], "{percent} %");
    }
}

#[test]
fn newer_small_cards_beat_no_older_large_ones() {
    let find = |model: &str| CARDS.iter().find(|card| card.model == model).expect("in the table");
    for (fast, slow) in [
        ("NVIDIA A100-SXM4-40GB", "NVIDIA GeForce RTX 3080 Ti Laptop GPU"),
        ("NVIDIA A100-SXM4-40GB", "NVIDIA L4"),
        ("NVIDIA H100 80GB HBM3", "NVIDIA GeForce RTX 5060"),
        ("NVIDIA H100 PCIe", "NVIDIA RTX PRO 6000 Blackwell Workstation Edition"),
        ("NVIDIA GeForce RTX 4090", "NVIDIA GeForce RTX 4090 Laptop GPU"),
        ("NVIDIA L40S", "NVIDIA L40"),
    ] {
        for agents in [
            (Agent::Now, Agent::Now),
            (Agent::Older, Agent::Older),
            (Agent::Older, Agent::Now),
        ] {
            let (first, second) = (ranked(find(fast), agents.0), ranked(find(slow), agents.1));
            assert!(first > second, "{fast} {first}, {slow} {second}, {agents:?}");
        }
    }
}

#[test]
fn whatever_an_inventory_says_of_a_gpu_it_is_ranked() {
    let rank = |cc: &str, sms: u32, clock_mhz: u32, bandwidth_gbs: u32| {
        let mut node = divvy_node("n", &[8]);
        edit_gpu(&mut node, 0, |gpu| {
            gpu.cc = cc.to_owned();
            (gpu.sms, gpu.clock_mhz, gpu.bandwidth_gbs) = (sms, clock_mhz, bandwidth_gbs);
        });
        rank_of(&node)
    };
    let numbers = [0, 1, 108, u32::MAX];
    for cc in [
        "",
        ".",
        "8",
        "8.",
        "8.0",
        "99.9",
        "-1.0",
        "4294967295.4294967295",
        "99999999999.0",
        "ö",
    ] {
        for sms in numbers {
            for clock in numbers {
                for bandwidth in numbers {
                    rank(cc, sms, clock, bandwidth);
                }
            }
        }
    }
    // Nothing is known, or little, or the GPU belongs to a future generation.
    assert_eq!(rank("", 0, 0, 0), 0);
    assert!(rank("", 0, 0, 320) > 0);
    assert!(rank("8.0", 0, 0, 0) > rank("7.5", 0, 0, 0));
    assert!(rank("99.0", 200, 2000, 20_000) > rank("10.0", 148, 1965, 8000));
    assert!(rank("99.0", 200, 2000, 0) > rank("99.0", 100, 2000, 0));
}
