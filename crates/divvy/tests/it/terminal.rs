//! A terminal with a program: a pseudo terminal, and an emulator that knows what a user sees.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::os::unix::process::ExitStatusExt as _;
use std::process::{Child, Command, ExitStatus};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::fs::OFlags;
use rustix::process::{Pid, Signal, kill_process};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{LocalModes, Winsize, tcgetattr, tcsetwinsize};

/// How long a screen may take. It comes at once on an idle machine.
const PATIENCE: Duration = Duration::from_secs(120);

type Seen = Arc<(Mutex<vt100::Parser>, Condvar)>;

/// A program on a terminal of its own.
pub(crate) struct Terminal {
    child: Child,
    /// The side of the emulator.
    keyboard: File,
    /// The side of the program, which stays open after the program has ended.
    line: File,
    seen: Seen,
}

impl Terminal {
    /// Start this program with these arguments.
    pub(crate) fn start(args: &[&str], env: &[(&str, &str)], columns: u16, rows: u16) -> Terminal {
        let keyboard = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).expect("a pseudo terminal");
        grantpt(&keyboard).expect("granted");
        unlockpt(&keyboard).expect("unlocked");
        let name = ptsname(&keyboard, Vec::new()).expect("a name").into_string().expect("UTF-8");
        let flags = i32::try_from(OFlags::NOCTTY.bits()).expect("a flag");
        let line = File::options()
            .read(true)
            .write(true)
            .custom_flags(flags)
            .open(name)
            .expect("opened");
        resize(&keyboard, columns, rows);
        let side = || line.try_clone().expect("another descriptor");
        // It becomes the program's controlling terminal, so that the program hears when the size changes.
        let child = Command::new("setsid")
            .args(["--ctty", env!("CARGO_BIN_EXE_divvy")])
            .args(args)
            .env_remove("KUBECONFIG")
            .env_remove("NO_COLOR")
            .env("HOME", "/nonexistent")
            .env("TERM", "xterm-256color")
            .env("LC_ALL", "C.UTF-8")
            .envs(env.iter().copied())
            .stdin(side())
            .stdout(side())
            .stderr(side())
            .spawn()
            .expect("setsid of util-linux");
        let seen: Seen = Arc::new((Mutex::new(vt100::Parser::new(rows, columns, 0)), Condvar::new()));
        let keyboard = File::from(keyboard);
        let (mut screen, shown) = (keyboard.try_clone().expect("another descriptor"), seen.clone());
        std::thread::spawn(move || {
            let mut part = [0; 4096];
            // An error says that no process has the other side open any more.
            while let Ok(length @ 1..) = screen.read(&mut part) {
                shown
                    .0
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .process(&part[..length]);
                shown.1.notify_all();
            }
        });
        Terminal {
            child,
            keyboard,
            line,
            seen,
        }
    }

    /// Wait until the screen has this property, and return its text.
    pub(crate) fn until(&self, is_so: impl Fn(&str) -> bool) -> String {
        let began = Instant::now();
        let mut parser = self.seen.0.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            let text = text(parser.screen());
            if is_so(&text) {
                return text;
            }
            assert!(began.elapsed() < PATIENCE, "the screen is\n{text}");
            let wait = self.seen.1.wait_timeout(parser, Duration::from_secs(1));
            parser = wait.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Press keys.
    pub(crate) fn press(&mut self, keys: &str) {
        self.keyboard.write_all(keys.as_bytes()).expect("written");
    }

    pub(crate) fn resize(&self, columns: u16, rows: u16) {
        let mut parser = self.seen.0.lock().unwrap_or_else(PoisonError::into_inner);
        parser.screen_mut().set_size(rows, columns);
        resize(&self.keyboard, columns, rows);
    }

    pub(crate) fn kill(&self, signal: Signal) {
        let process = i32::try_from(self.child.id())
            .ok()
            .and_then(Pid::from_raw)
            .expect("a process");
        kill_process(process, signal).expect("sent");
    }

    /// Report whether keys reach the program as they are pressed.
    pub(crate) fn is_raw(&self) -> bool {
        let modes = tcgetattr(&self.line).expect("its modes").local_modes;
        !modes.intersects(LocalModes::ICANON | LocalModes::ECHO)
    }

    /// Wait until the program has ended, check that the terminal is as it was before, and return the status and the text on it.
    pub(crate) fn ended(mut self) -> (ExitStatus, String) {
        let status = self.child.wait().expect("it ends");
        assert!(status.signal().is_none(), "{status}");
        assert!(!self.is_raw(), "the terminal is in raw mode");
        // What the program wrote last arrives before this word.
        self.line.write_all(b"the end").expect("written");
        let text = self.until(|text| text.contains("the end"));
        let parser = self.seen.0.lock().unwrap_or_else(PoisonError::into_inner);
        assert!(!parser.screen().alternate_screen(), "the alternate screen is shown");
        assert!(!parser.screen().hide_cursor(), "the cursor is hidden");
        (status, text)
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        // It has ended already if the test went well.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn text(screen: &vt100::Screen) -> String {
    let (_, columns) = screen.size();
    let rows: Vec<String> = screen.rows(0, columns).map(|row| row.trim_end().to_owned()).collect();
    rows.join("\n")
}

fn resize(terminal: &impl std::os::fd::AsFd, columns: u16, rows: u16) {
    let size = Winsize {
        ws_row: rows,
        ws_col: columns,
        ws_xpixel: 0,
        ws_ypixel: 0,
    };
    tcsetwinsize(terminal, size).expect("resized");
}
