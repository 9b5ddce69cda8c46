// Package arch holds tests of the whole source tree: which package may import which, that packages say what they are for, and
// that files stay readable and fit for any machine. It tests no behaviour and nothing imports it.
//
// When a rule is in the way, change the rule here on purpose, with its reason, or change the code.
package arch
