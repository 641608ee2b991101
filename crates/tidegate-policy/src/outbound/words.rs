//! Providers in words, with the true bound of every limit.
