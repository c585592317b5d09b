//! Confines this process with the walls of the operating system.
