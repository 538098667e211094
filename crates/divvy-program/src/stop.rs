//! Stops a program that otherwise runs indefinitely.

use std::io::Read as _;

use tokio_util::sync::CancellationToken;

/// Return a token that is cancelled by SIGTERM and SIGINT and, with `--exit-with-stdin`, by the end of standard input.
pub fn until_stopped(exit_with_stdin: bool) -> std::io::Result<CancellationToken> {
    use tokio::signal::unix::{SignalKind, signal};
    let token = CancellationToken::new();
    let (mut terminate, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    let stop = token.clone();
    tokio::spawn(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
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
