//! Stops a program that otherwise runs indefinitely.

use std::io::Read as _;

use tokio_util::sync::CancellationToken;

/// Return a token that is cancelled by SIGTERM, SIGINT, and SIGQUIT and, with `--exit-with-stdin`, by the end of standard input.
pub fn until_stopped(exit_with_stdin: bool) -> std::io::Result<CancellationToken> {
    use tokio::signal::unix::{SignalKind, signal};
    let token = CancellationToken::new();
    let (mut terminate, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    // NVIDIA's programs end in an orderly way at SIGQUIT as well.
    let mut quit = signal(SignalKind::quit())?;
    let stop = token.clone();
    tokio::spawn(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
            _ = quit.recv() => {}
        }
        stop.cancel();
    });
    if exit_with_stdin {
        let stop = token.clone();
        // A separate thread, because a blocked read of standard input cannot be cancelled and must not delay the end of the program.
        std::thread::spawn(move || {
            let mut stdin = std::io::stdin().lock();
            let mut buffer = [0; 256];
            while stdin.read(&mut buffer).is_ok_and(|read| read > 0) {}
            stop.cancel();
        });
    }
    Ok(token)
}

#[cfg(test)]
mod tests {
    use std::process::{Command, id};

    use super::*;

    #[tokio::test]
    async fn each_signal_that_asks_a_program_to_end_cancels_the_token() {
        for name in ["TERM", "INT", "QUIT"] {
            let stop = until_stopped(false).expect("handlers");
            let sent = Command::new("kill").args(["-s", name, &id().to_string()]).status();
            assert!(sent.expect("kill").success());
            stop.cancelled().await;
        }
    }
}
