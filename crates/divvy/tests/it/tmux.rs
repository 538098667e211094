//! tmux, with a window in which a shell runs.

use std::process::{Command, Output};
use std::time::{Duration, Instant};

use tempfile::TempDir;

/// How long a screen may take. It comes at once on an idle machine.
const PATIENCE: Duration = Duration::from_secs(120);
/// What the shell says when it waits for a command.
const PROMPT: &str = "ready> ";

/// A tmux server with one window, which no other test uses.
pub(crate) struct Tmux {
    directory: TempDir,
}

impl Tmux {
    /// Start a shell in a window of this size.
    pub(crate) fn start(env: &[(&str, &str)], columns: u16, rows: u16) -> Tmux {
        let tmux = Tmux {
            directory: tempfile::tempdir().expect("a directory"),
        };
        let settings = "set -g status off\nset -g default-terminal tmux-256color\n";
        std::fs::write(tmux.directory.path().join("conf"), settings).expect("written");
        let (columns, rows) = (columns.to_string(), rows.to_string());
        let mut session = vec!["new-session", "-d", "-x", &columns, "-y", &rows];
        let prompt = format!("PS1={PROMPT}");
        let env: Vec<String> = env.iter().map(|(name, value)| format!("{name}={value}")).collect();
        for pair in env
            .iter()
            .map(String::as_str)
            .chain([prompt.as_str(), "HOME=/nonexistent", "LC_ALL=C.UTF-8"])
        {
            session.extend(["-e", pair]);
        }
        session.extend(["sh", "-i"]);
        tmux.ask(&session);
        tmux.until(|text| text.trim_end() == PROMPT.trim_end());
        tmux
    }

    /// Press keys: `Enter`, `Escape`, or characters.
    pub(crate) fn press(&self, keys: &[&str]) {
        self.ask(&[&["send-keys", "-t", ":"], keys].concat());
    }

    /// Type a command, and press Enter.
    pub(crate) fn run(&self, command: &str) {
        self.ask(&["send-keys", "-t", ":", "-l", command]);
        self.press(&["Enter"]);
    }

    pub(crate) fn resize(&self, columns: u16, rows: u16) {
        let (columns, rows) = (columns.to_string(), rows.to_string());
        self.ask(&["resize-window", "-t", ":", "-x", &columns, "-y", &rows]);
    }

    /// Report whether a program shows its own screen, and not the one with the shell's commands.
    pub(crate) fn is_alternate(&self) -> bool {
        self.ask(&["display-message", "-p", "-t", ":", "#{alternate_on}"]).trim() == "1"
    }

    /// Wait until the screen has this property, and return its text: a line for each row, without the spaces at its end.
    pub(crate) fn until(&self, is_so: impl Fn(&str) -> bool) -> String {
        let began = Instant::now();
        loop {
            let screen = self.ask(&["capture-pane", "-p", "-t", ":"]);
            let rows: Vec<&str> = screen
                .strip_suffix('\n')
                .unwrap_or(&screen)
                .split('\n')
                .map(str::trim_end)
                .collect();
            let text = rows.join("\n");
            if is_so(&text) {
                return text;
            }
            assert!(began.elapsed() < PATIENCE, "the screen is\n{text}");
            std::thread::yield_now();
        }
    }

    /// Give tmux a command, and return what it prints.
    fn ask(&self, command: &[&str]) -> String {
        let Output { status, stdout, stderr } = self.call(command);
        assert!(status.success(), "tmux {command:?}: {}", String::from_utf8_lossy(&stderr));
        String::from_utf8(stdout).expect("UTF-8")
    }

    fn call(&self, command: &[&str]) -> Output {
        let path = |name: &str| self.directory.path().join(name);
        Command::new("tmux")
            .arg("-u")
            .arg("-S")
            .arg(path("socket"))
            .arg("-f")
            .arg(path("conf"))
            .args(command)
            .env_remove("TMUX")
            .env_remove("KUBECONFIG")
            .env_remove("NO_COLOR")
            .output()
            .expect("tmux")
    }
}

impl Drop for Tmux {
    fn drop(&mut self) {
        self.call(&["kill-server"]);
    }
}
