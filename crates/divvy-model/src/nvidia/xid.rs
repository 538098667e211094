//! NVIDIA's catalog of XIDs, the error codes that the driver writes to the kernel log: what each number means, and what to do.
//!
//! Sources: <https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html> (October 2025; the column "immediate action"),
//! and NVIDIA/open-gpu-kernel-modules, `src/common/sdk/nvidia/inc/nverror.h` (the numbers).

use XidAction::{CheckLinks, CheckPower, Ignore, RebootNode, ResetGpu, RestartProgram, Support, UpdateDriver};

/// What to do after an XID.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum XidAction {
    /// Nothing. The GPU and its programs continue.
    Ignore,
    /// Start the program again. The other programs on the GPU continue.
    RestartProgram,
    /// Look for the error of the link to another GPU or to a switch.
    CheckLinks,
    /// Reset the GPU, after all programs on it have ended.
    ResetGpu,
    /// Reboot the node.
    RebootNode,
    /// Look at the card: power cables, seat, temperature.
    CheckPower,
    /// Install the driver, or the host's vGPU software, in a version that fits.
    UpdateDriver,
    /// Ask NVIDIA or the vendor of the machine. The catalog names nothing else.
    Support,
}

/// A row of the catalog.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Xid {
    first: u64,
    last: u64,
    /// What happened, for example `GPU memory page fault`.
    pub name: &'static str,
    /// What to do according to the number alone.
    pub action: XidAction,
}

/// Return one row for several numbers.
const fn rows(first: u64, last: u64, action: XidAction, name: &'static str) -> Xid {
    Xid {
        first,
        last,
        name,
        action,
    }
}

const fn row(number: u64, action: XidAction, name: &'static str) -> Xid {
    rows(number, number, action, name)
}

/// The numbers that the catalog describes. It calls the other ones unused.
const CATALOG: &[Xid] = &[
    row(8, RestartProgram, "GPU stopped processing"),
    row(11, RestartProgram, "invalid or corrupted push buffer stream"),
    row(13, RestartProgram, "graphics engine exception"),
    row(25, RestartProgram, "invalid or illegal push buffer stream"),
    row(31, RestartProgram, "GPU memory page fault"),
    row(32, RestartProgram, "invalid or corrupted push buffer stream"),
    rows(37, 38, Ignore, "driver firmware error"),
    rows(39, 41, RestartProgram, "copy engine exception"),
    row(43, Ignore, "GPU stopped processing the work of a program"),
    row(44, Ignore, "graphics engine fault during a context switch"),
    row(
        45,
        RestartProgram,
        "cleanup after the end of a program or after another error",
    ),
    row(46, ResetGpu, "GPU stopped processing"),
    row(48, ResetGpu, "double-bit ECC error"),
    row(54, CheckPower, "auxiliary power is not connected to the card"),
    row(60, RestartProgram, "video processor exception"),
    row(61, Support, "internal microcontroller breakpoint"),
    row(62, ResetGpu, "internal microcontroller halt"),
    row(
        63,
        Ignore,
        "a row or page of the memory was replaced, or will be at the next reset",
    ),
    row(64, ResetGpu, "a row or page of the memory could not be replaced"),
    rows(66, 67, Ignore, "illegal access by the driver"),
    row(68, RestartProgram, "video decoder exception"),
    row(69, RestartProgram, "graphics engine class error"),
    rows(70, 72, RestartProgram, "copy engine error"),
    row(74, CheckLinks, "NVLink error"),
    rows(75, 77, RestartProgram, "copy engine error"),
    row(78, UpdateDriver, "vGPU could not start"),
    row(79, RebootNode, "GPU has fallen off the bus"),
    row(80, RestartProgram, "corrupted data sent to the GPU"),
    row(82, RestartProgram, "JPEG engine error"),
    rows(83, 84, RestartProgram, "video decoder error"),
    row(85, RestartProgram, "copy engine error"),
    row(86, RestartProgram, "optical flow engine exception"),
    rows(88, 89, RestartProgram, "video decoder error"),
    row(92, Ignore, "high rate of corrected (single-bit) ECC errors"),
    row(93, Ignore, "the InfoROM was written more often than planned"),
    row(94, RestartProgram, "contained memory error"),
    row(95, ResetGpu, "uncontained memory error"),
    rows(96, 98, RestartProgram, "video decoder error"),
    rows(99, 105, RestartProgram, "JPEG engine error"),
    rows(106, 107, Ignore, "test message of the system management bus"),
    row(108, Ignore, "NVLink remote translation error"),
    row(109, ResetGpu, "context switch timeout"),
    row(110, ResetGpu, "security fault"),
    row(119, ResetGpu, "the GPU's system processor (GSP) did not answer in time"),
    row(120, ResetGpu, "error of the GPU's system processor (GSP)"),
    row(121, Ignore, "corrected error of the link between CPU and GPU (C2C)"),
    rows(122, 124, Support, "the GPU's flash memory could not be accessed"),
    row(125, Support, "InfoROM file system error"),
    rows(126, 135, RestartProgram, "copy engine error"),
    row(136, ResetGpu, "NVLink training failed"),
    row(137, Ignore, "NVLink privilege error: a fault on another GPU ended an access"),
    row(139, RestartProgram, "optical flow engine error"),
    row(140, ResetGpu, "ECC error that was not recovered"),
    row(141, Ignore, "CUDA fast path error"),
    row(142, Support, "video encoder error"),
    row(143, ResetGpu, "GPU initialization error"),
    rows(144, 148, Ignore, "NVLink error"),
    rows(149, 150, ResetGpu, "NVLink error"),
    row(151, RebootNode, "key rotation error"),
    rows(152, 153, Ignore, "deep learning accelerator error"),
    row(154, ResetGpu, "the driver names the action that this GPU needs"),
    rows(155, 156, ResetGpu, "NVLink error or retired part of the GPU"),
    row(157, Ignore, "a part of the GPU could not be retired"),
    rows(158, 159, ResetGpu, "fatal timeout, or bus error between CPU and GPU"),
    rows(160, 161, Ignore, "a channel of the memory was retired"),
    rows(162, 165, Ignore, "the power smoothing circuit was switched or is worn"),
    rows(
        166,
        170,
        Support,
        "error of encryption, PCIe, protected memory, or a microcontroller",
    ),
    row(171, ResetGpu, "uncorrectable error of the GPU's memory (DRAM), with XID 48"),
    row(172, ResetGpu, "uncorrectable error of the GPU's caches (SRAM), with XID 48"),
];

/// Return the catalog's row for a number.
pub fn lookup(number: u64) -> Option<&'static Xid> {
    CATALOG.iter().find(|row| (row.first..=row.last).contains(&number))
}

/// Return what to do after an XID, given the rest of its line in the kernel log, which may say more than the number: `RST: No` (memory
/// errors), `Nonfatal` (NVLink), or the action itself (154: `changed from 0x0 (None) to 0x1 (GPU Reset Required)`).
pub fn action(number: u64, text: &str) -> XidAction {
    let text = text.to_ascii_lowercase();
    let says = |words: &str| text.contains(words);
    match number {
        154 => match text.rsplit_once(" to ").map_or("", |(_, new)| new) {
            new if new.contains("(none)") => Ignore,
            new if new.contains("reboot") => RebootNode,
            new if new.contains("p2p") => CheckLinks,
            _ => ResetGpu,
        },
        144..=150 if says("nonfatal") || says("non-fatal") => Ignore,
        144..=150 if says("fatal") => ResetGpu,
        _ if says("rst: yes") => ResetGpu,
        94 | 95 if says("rst: no") => RestartProgram,
        _ => lookup(number).map_or(Support, |row| row.action),
    }
}

/// Report whether an XID makes the GPU unfit for new pods, given the rest of its line. Unknown XIDs do, because the errors of a newer
/// driver may not be harmless.
pub fn is_fatal(number: u64, text: &str) -> bool {
    // The catalog advises a reset after 109. NVIDIA's device plugin counts it as an error of the program (`ignoredXids` in
    // internal/rm/health.go), and so does this function.
    number != 109 && !matches!(action(number, text), Ignore | RestartProgram)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_number_has_at_most_one_row_and_the_rows_are_in_order() {
        assert!(CATALOG.iter().all(|row| row.first <= row.last));
        assert!(CATALOG.windows(2).all(|pair| pair[0].last < pair[1].first));
    }

    #[test]
    fn only_an_error_of_the_gpu_fails_it() {
        for xid in [13, 31, 43, 45, 63, 68, 92, 94, 109, 121, 137, 144, 145] {
            assert!(!is_fatal(xid, ""), "{xid}");
        }
        for xid in [0, 48, 54, 62, 64, 74, 79, 95, 119, 120, 140, 149, 154, 999, u64::MAX] {
            assert!(is_fatal(xid, ""), "{xid}");
        }
    }

    #[test]
    fn the_words_of_the_line_decide() {
        for (number, text, expected) in [
            (
                94,
                "pid='<unknown>', name=<unknown>, Contained: SM (0x1). RST: No, D-RST: No",
                RestartProgram,
            ),
            (95, "Uncontained: LTC TAG (0x2,0x0). RST: Yes, D-RST: No", ResetGpu),
            (144, "SAW_MVB Nonfatal XC0 i0 Link 0 (0x00000001)", Ignore),
            (145, "RLW_RXPIPE Non-fatal XC0 i0 Link 13", Ignore),
            (145, "RLW_RSP Fatal XC0 i0 Link 13", ResetGpu),
            (149, "NETIR_LINK_EVT  Fatal   XC0 i0 Link 01", ResetGpu),
            (
                154,
                "GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)",
                ResetGpu,
            ),
            (
                154,
                "GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)",
                Ignore,
            ),
            (
                154,
                "GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)",
                RebootNode,
            ),
            (
                154,
                "GPU recovery action changed from 0x0 (None) to 0x3 (Drain P2P)",
                CheckLinks,
            ),
            (
                154,
                "GPU recovery action changed from 0x0 (None) to 0x4 (Drain and Reset)",
                ResetGpu,
            ),
            (79, "GPU has fallen off the bus.", RebootNode),
            (999, "", Support),
        ] {
            assert_eq!(action(number, text), expected, "{number} {text}");
        }
    }
}
