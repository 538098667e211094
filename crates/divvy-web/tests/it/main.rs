//! Who sees the pages, and how they are updated.

mod events;
mod impatient;
mod pages;
mod site;
