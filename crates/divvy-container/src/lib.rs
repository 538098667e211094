//! CDI specs and what surrounds a container: text in, text out
