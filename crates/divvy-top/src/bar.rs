//! One bar for what is allocated and what is used of it.

use divvy_view::amounts::Amounts;

/// The left eighths of a cell: `EIGHTHS[n]` has n of them.
const EIGHTHS: [char; 8] = [' ', '▏', '▎', '▍', '▌', '▋', '▊', '▉'];

/// Return a bar of `width` cells: `█` used, `!` used beyond a share, `▒` allocated and not used, `▚` held by containers of deleted pods, `░` free; in ASCII
/// `#`, `!`, `=`, `:`, and `.`.
pub(crate) fn bar(of: &Amounts, width: usize, ascii: bool) -> String {
    if of.total == 0 {
        return " ".repeat(width);
    }
    // In eighths of a cell.
    let eighths = |bytes: u64| -> usize {
        let parts = u128::from(bytes.min(of.total)) * (width as u128) * 8;
        usize::try_from(parts / u128::from(of.total)).unwrap_or(0)
    };
    let used = eighths(of.within);
    let over = eighths(of.within.saturating_add(of.over));
    // Memory beyond a share is shown, however little it is.
    let over = if of.over > 0 { over.max(used / 8 * 8 + 8) } else { used };
    let allocated = eighths(of.allocated);
    let held = eighths(of.allocated.saturating_add(of.held));
    let [full, idle, gone, free] = if ascii {
        ['#', '=', ':', '.']
    } else {
        ['█', '▒', '▚', '░']
    };
    let cell = |at: usize| {
        let (begin, end) = (at * 8, at * 8 + 8);
        if end <= used {
            full
        } else if of.over > 0 && begin < over {
            '!'
        } else if begin < used && !ascii {
            EIGHTHS[used - begin]
        } else if begin < used && used - begin >= 4 {
            full
        } else if begin < allocated && allocated - begin >= 4 {
            idle
        } else if begin < held && held - begin >= 4 {
            gone
        } else {
            free
        }
    };
    (0..width).map(cell).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn amounts(total: u64, allocated: u64, within: u64, over: u64) -> Amounts {
        Amounts {
            total,
            allocated,
            within,
            over,
            used: Some(within + over),
            ..Amounts::default()
        }
    }

    #[test]
    fn a_bar_shows_what_is_used_idle_free_and_over() {
        for (total, allocated, within, over, expected, ascii) in [
            (8, 0, 0, 0, "░░░░", "...."),
            (8, 8, 0, 0, "▒▒▒▒", "===="),
            (8, 8, 8, 0, "████", "####"),
            (8, 6, 2, 0, "█▒▒░", "#==."),
            (64, 48, 18, 0, "█▏▒░", "#==."),
            (64, 48, 31, 0, "█▉▒░", "##=."),
            (8, 4, 4, 2, "██!░", "##!."),
            (8, 4, 4, 0, "██░░", "##.."),
            (1000, 500, 500, 1, "██!░", "##!."),
            (8, 8, 8, 8, "████", "####"),
            (0, 0, 0, 0, "    ", "    "),
        ] {
            let of = amounts(total, allocated, within, over);
            assert_eq!(bar(&of, 4, false), expected, "{of:?}");
            assert_eq!(bar(&of, 4, true), ascii, "{of:?}");
        }
    }

    #[test]
    fn deleted_pods_memory_comes_between_allocated_and_free() {
        for (allocated, held, expected, ascii) in [(2, 2, "▒▚░░", "=:.."), (0, 8, "▚▚▚▚", "::::"), (6, 1, "▒▒▒▚", "===:")]
        {
            let of = Amounts {
                held,
                ..amounts(8, allocated, 0, 0)
            };
            assert_eq!(
                (bar(&of, 4, false).as_str(), bar(&of, 4, true).as_str()),
                (expected, ascii),
                "{of:?}"
            );
        }
    }

    proptest! {
        #[test]
        fn a_bar_has_its_width_whatever_the_amounts_are(
            total in any::<u64>(), allocated in any::<u64>(), within in 0..u64::MAX / 2, over in 0..u64::MAX / 2, width in 0..300_usize, ascii in any::<bool>(),
        ) {
            let of = amounts(total, allocated, within, over);
            prop_assert_eq!(bar(&of, width, ascii).chars().count(), width);
        }
    }
}
