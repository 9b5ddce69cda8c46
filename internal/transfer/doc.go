// Package transfer moves snapshots out of and into a daemon's stores as packs: it joins the pack format (internal/snapshot/pack), the image
// store and the domain, none of which knows the others.
//
// It is for what only all three together can say: which snapshot a tag stands for, that an unpacked one gets its tag or is taken back, and
// that an image on its way in or out is in use. It knows neither HTTP nor keys: who may do what with which key is decided by its callers,
// and a private key never comes here (docs/decisions has why).
package transfer
