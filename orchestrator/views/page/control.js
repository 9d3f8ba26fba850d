"use strict";
// Buttons that change a run.

function controls() { return []; }
function envControls() { return null; }
