export class MapView { constructor(){ this.element=document.createElement("div"); } update(){} }
